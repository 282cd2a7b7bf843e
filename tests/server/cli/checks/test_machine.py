"""Faults of a machine's disks and memory."""

import itertools
from pathlib import Path

import pytest

from registry.storage.free_space import volume_of
from server.cli.checks.machine import check_disk, check_memory


def test_a_disk_with_room_is_well_and_the_probe_is_gone(tmp_path):
    finding = check_disk(tmp_path, 0)
    assert (finding.verdict, "an fsync takes" in finding.found) == ("ok", True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_still_to_be_made_is_not_made(tmp_path):
    finding = check_disk(tmp_path / "a" / "b", 0)
    assert (finding.verdict, "will be made" in finding.found) == ("ok", True)
    assert not list(tmp_path.iterdir())


def test_a_reserve_that_is_used_up_is_wrong_and_says_what_is_refused(tmp_path):
    finding = check_disk(tmp_path, 1 << 60)
    assert finding.verdict == "wrong"
    assert "507" in finding.todo


def test_a_disk_with_little_room_beyond_the_reserve_is_a_warning(tmp_path):
    found = volume_of(tmp_path)
    finding = check_disk(tmp_path, found.free_bytes - found.size_bytes // 100)
    assert (finding.verdict, "beyond the reserve" in finding.found) == ("warning", True)


def test_a_folder_that_takes_no_file_is_wrong():
    with pytest.raises(OSError, match="proc"):
        check_disk(Path("/proc"), 0)


def test_a_disk_that_syncs_slowly_is_a_warning(tmp_path):
    clock = itertools.count(0.0, 0.3)
    finding = check_disk(tmp_path, 0, lambda: next(clock))
    assert (finding.verdict, finding.found) == ("warning", "An fsync takes 300 ms.")


def test_memory_is_counted():
    assert "are free" in check_memory().found


@pytest.mark.parametrize(("kept", "verdict"), [(900, "ok"), (9, "warning")])
def test_files_that_a_container_keeps_in_memory_are_no_lack_of_it(tmp_path, kept, verdict):
    figures = {"max": "1000000", "current": "995000", "stat": f"anon 7\ninactive_file {kept}000"}
    for name, text in figures.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert check_memory(tmp_path).verdict == verdict
