"""Control files, which supervisor, placer and gateways exchange."""

import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from server.pool.control_files import (
    ControlFileDamaged,
    Member,
    WantedEngines,
    members_file,
    wanted_file,
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
    members_file(data_dir).write(members)
    wanted_file(data_dir).write(engines)
    assert members_file(data_dir).read() == tuple(members)
    assert wanted_file(data_dir).read() == engines


def test_where_nobody_has_said_anything_there_is_nothing(tmp_path):
    assert members_file(tmp_path).read() == ()
    assert wanted_file(tmp_path).read() is None
    assert wanted_file(tmp_path).changed_at == 0


def test_a_reader_finds_the_old_list_or_the_new_one_and_never_a_part(tmp_path):
    file = members_file(tmp_path)
    lists = [ONE], [ONE, FAR], [Member(f"engine-{i}", "x" * 500) for i in range(200)]
    file.write(lists[0])
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            for members in lists:
                members_file(tmp_path).write(members)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            assert len(file.read()) in (1, 2, 200)
    finally:
        is_over.set()
        writer.join()


@pytest.mark.parametrize(
    "content",
    [
        "", "{}", "[", "3", "[3]", '[{"name": "a"}]', '[{"name": "a", "address": 3}]',
        '[{"nome": "a", "address": ""}]', '["\udcff"]',
    ],
)  # fmt: skip
def test_members_that_are_none_say_what_to_do(tmp_path, content):
    file = members_file(tmp_path)
    file.path.parent.mkdir()
    file.path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ControlFileDamaged, match=r"members\.json.*remove it"):
        file.read()


@pytest.mark.parametrize("engines", ["-1", "65", "1.5", '"3"', "true", "[]"])
def test_a_number_of_engines_that_cannot_be_is_refused(tmp_path, engines):
    file = wanted_file(tmp_path)
    file.path.parent.mkdir()
    file.path.write_text(engines)
    with pytest.raises(ControlFileDamaged, match=r"wanted\.json.*remove it"):
        file.read()


def test_a_change_is_read_once(tmp_path):
    file = members_file(tmp_path)
    assert (file.look(), file.latest()) == (False, ())
    for members in ((ONE,), (ONE, FAR), (FAR,)):
        members_file(tmp_path).write(members)
        assert file.look()
        assert not file.look()
        assert file.content == members
    file.look_again()
    assert file.look()
    file.write((ONE,))
    assert not file.look(), "the writer knows it"


def make_unreadable(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("{"), make_unreadable])
def test_the_former_content_of_a_damaged_file_is_kept(tmp_path, caplog, spoil):
    file = members_file(tmp_path)
    file.write((ONE,))
    spoil(file.path)
    assert not file.look()
    assert file.latest() == file.latest() == (ONE,)
    assert len(caplog.records) == 1, "the fault is logged once"


def test_what_is_kept_is_written_when_it_changes_or_was_deleted_and_at_first(tmp_path):
    members_file(tmp_path).write((FAR,))
    file = members_file(tmp_path)
    for members in ((), (ONE,)):
        file.keep(members)
        assert file.read() == members
    members_file(tmp_path).write((FAR,))
    file.keep((ONE,))
    assert file.read() == (FAR,), "it was written before"
    shutil.rmtree(tmp_path / "pool")
    file.keep((ONE,))
    assert file.read() == (ONE,)


def test_the_most_that_a_gateway_wants_counts_within_its_bounds(tmp_path):
    wanted = WantedEngines(tmp_path)
    assert (wanted.latest(), wanted.within(2, 4)) == (None, 2)
    wanted_file(tmp_path).write(3)
    wanted_file(tmp_path, 2).write(1)
    assert [wanted.within(*bounds) for bounds in ((2, 4), (4, 6), (1, 2))] == [3, 4, 2]
    wanted_file(tmp_path).path.write_text("three")
    assert wanted.latest() == 3, "a damaged file changes nothing"
    for number in (1, 2):
        wanted_file(tmp_path, number).write(0)
    assert wanted.within(2, 4) == 0
    WantedEngines(tmp_path).forget()  # which has not looked at any file yet
    assert WantedEngines(tmp_path).latest() is None
