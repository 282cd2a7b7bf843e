"""Files that the placer and the gateway exchange: running engines, and how many should run."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.endpoint import Endpoint
from server.pool.files import (
    Member,
    PoolFileDamaged,
    changed_at,
    members_path,
    read_members,
    read_wanted,
    wanted_path,
    write_members,
    write_wanted,
)

ONE = Member("engine", "ipc:///data/engine/engine.sock")
FAR = Member("engine-2", "tcp://10.0.0.7:5555", "k" * 40)


@hypothesis_settings(deadline=None)
@given(
    members=st.lists(
        st.builds(Member, st.text(), st.text(), st.text()), unique_by=lambda member: member.name
    ),
    engines=st.integers(1, 64),
)
def test_what_is_written_is_read(tmp_path_factory, members, engines):
    data_dir = tmp_path_factory.mktemp("data")
    write_members(members_path(data_dir), members)
    write_wanted(wanted_path(data_dir), engines)
    assert read_members(members_path(data_dir)) == tuple(members)
    assert read_wanted(wanted_path(data_dir)) == engines


def test_where_nobody_has_said_anything_there_is_nothing(tmp_path):
    assert read_members(members_path(tmp_path)) == ()
    assert read_wanted(wanted_path(tmp_path)) is None
    assert changed_at(wanted_path(tmp_path)) == 0


def test_a_member_is_where_a_client_connects_to():
    assert FAR.endpoint == Endpoint("tcp://10.0.0.7:5555", "k" * 40)


def test_the_files_are_as_the_other_side_expects_them(tmp_path):
    write_members(members_path(tmp_path), [ONE])
    write_wanted(wanted_path(tmp_path), 3)
    assert json.loads((tmp_path / "pool" / "members.json").read_text()) == {
        "engines": [{"name": "engine", "address": ONE.address, "server_key": ""}]
    }
    assert json.loads((tmp_path / "pool" / "wanted.json").read_text()) == {"engines": 3}
    assert changed_at(wanted_path(tmp_path)) > 0


def test_a_reader_finds_the_old_list_or_the_new_one_and_never_a_part(tmp_path):
    path = members_path(tmp_path)
    lists = [ONE], [ONE, FAR], [Member(f"engine-{i}", "x" * 500) for i in range(200)]
    write_members(path, lists[0])
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            for members in lists:
                write_members(path, members)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            assert len(read_members(path)) in (1, 2, 200)
    finally:
        is_over.set()
        writer.join()


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", '{"engines"', '{"engines": 3}', '{"engines": [3]}',
        '{"engines": [{"name": "a"}]}',
        '{"engines": [{"name": "a", "address": 3}]}', '{"engines": [{"nome": "a", "address": ""}]}',
        '{"engines": [{"name": "a", "address": ""}, {"name": "a", "address": ""}]}', "\udcff",
    ],
)  # fmt: skip
def test_members_that_are_none_say_what_to_do(tmp_path, content):
    path = tmp_path / "members.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PoolFileDamaged, match=r"members\.json.*remove it"):
        read_members(path)


@pytest.mark.parametrize("engines", ["-1", "65", "1.5", '"3"', "true", "[]"])
def test_a_number_of_engines_that_cannot_be_is_refused(tmp_path, engines):
    path = tmp_path / "wanted.json"
    path.write_text(f'{{"engines": {engines}}}')
    with pytest.raises(PoolFileDamaged, match=r"wanted\.json.*remove it"):
        read_wanted(path)
