import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from registry.whole_files import write_whole


def test_a_file_is_its_owners_alone_and_whole_whoever_writes_it(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([number]) * 100_000 for number in range(4)]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(write_whole, [path] * 4, contents))
    assert path.read_bytes() in contents
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_is_full_leaves_the_file_as_it_was_and_no_other(tmp_path, monkeypatch):
    def full(_):
        raise OSError("full")

    path = tmp_path / "file"
    write_whole(path, b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_whole(path, b"after", sync=True)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]
