"""The gateway's view of the placer's members file."""

import pytest

from server.pool.files import Member, members_path, write_members
from server.pool.membership import Membership


@pytest.fixture
def membership(tmp_path):
    return Membership(tmp_path)


def test_who_comes_and_goes_is_known_at_the_next_look(membership, tmp_path):
    one, two = Member("engine", "ipc:///a"), Member("engine-2", "ipc:///b")
    assert membership() == ()
    for members in ((one,), (one, two), (two,)):
        write_members(members_path(tmp_path), members)
        assert membership() == members


def make_unreadable(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("{"), make_unreadable])
def test_a_damaged_file_changes_nothing(membership, tmp_path, caplog, spoil):
    one = Member("engine", "ipc:///a")
    write_members(members_path(tmp_path), [one])
    assert membership() == (one,)
    spoil(members_path(tmp_path))
    assert membership() == membership() == (one,)
    assert len(caplog.records) == 1, "the fault is logged once"
