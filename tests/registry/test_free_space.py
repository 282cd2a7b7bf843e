"""The reserve of a volume, whatever is promised."""

import errno
import os
from pathlib import Path

import pytest

from registry.errors import NoRoom
from registry.storage.free_space import MAX_RESERVE_BYTES, FreeSpace, Volume, WorkDir, volume_of
from registry.storage.storage import LocalStorage
from tests.registry.fake_disk import FakeDisk

HERE = Path("/here")


def test_what_is_promised_to_one_is_not_promised_to_another():
    disk = FakeDisk(free_bytes=1000)
    space = FreeSpace(400, disk)
    with space.promise((HERE, 500)):
        assert space.left_bytes(HERE) == 100
        with pytest.raises(NoRoom), space.promise((HERE, 101)):
            pass
        with space.promise((HERE, 100)):
            pass
    assert space.left_bytes(HERE) == 600


def test_bytes_for_two_folders_of_one_volume_add_up():
    space = FreeSpace(0, FakeDisk(free_bytes=1000))
    with pytest.raises(NoRoom), space.promise((HERE, 501), (HERE / "below", 501)):
        pass
    with space.promise((HERE, 501), (None, 501)):
        assert space.left_bytes(HERE) == 499


def test_volumes_do_not_take_each_others_room():
    space = FreeSpace(100, lambda folder: Volume(len(folder.name), 1000, 600))
    with space.promise((HERE, 500), (HERE / "there", 500)):
        assert space.left_bytes(Path("/other-volume")) == 500


@pytest.mark.parametrize(
    ("size_bytes", "reserve_bytes"), [(40_000_000, 10_000_000), (1 << 40, MAX_RESERVE_BYTES)]
)
def test_a_small_volume_has_a_smaller_reserve(size_bytes, reserve_bytes):
    space = FreeSpace(None, FakeDisk(size_bytes, size_bytes))
    assert space.left_bytes(HERE) == size_bytes - reserve_bytes


@pytest.mark.parametrize(("free_bytes", "is_low"), [(1050, False), (1049, True), (10, True)])
def test_a_volume_is_low_with_less_than_a_twentieth_above_the_reserve(free_bytes, is_low):
    space = FreeSpace(50, FakeDisk(free_bytes, size_bytes=20_000))
    assert space.is_low(HERE) is is_low


def test_a_folder_that_is_not_made_yet_is_on_its_parents_volume(tmp_path):
    assert volume_of(tmp_path / "a" / "b").device == tmp_path.stat().st_dev


def test_a_work_dir_that_was_deleted_is_made_again(tmp_path):
    work = WorkDir(tmp_path / "work", FreeSpace(0, FakeDisk(free_bytes=10)))
    for _ in range(2):
        with work.folder("job-", 10) as folder:
            (folder / "file").write_bytes(b"x")
            assert folder.parent == work.path
        assert list(work.path.iterdir()) == []
        work.path.rmdir()


def test_a_disk_that_is_full_in_spite_of_all_is_no_room(tmp_path):
    work = WorkDir(tmp_path / "work", FreeSpace(0, FakeDisk(free_bytes=10)))
    with pytest.raises(NoRoom), work.folder("job-", 10):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_store_on_a_full_disk_has_no_room(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_bytes(b"x")
    storage = LocalStorage(tmp_path / "store")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoRoom):
        storage.put("key", tmp_path / "file")
    assert list(storage.list("")) == []
