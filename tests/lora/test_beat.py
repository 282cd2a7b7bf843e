"""Beats are seldom, come at once when something is announced, and wait for nothing."""

import contextlib
import os
import tempfile

import pytest

from lora.beat import RECORD, VARIABLE, Beat
from tests.engine.fakes import FakeClock


@pytest.fixture
def file():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(RECORD.size))
        file.flush()
        yield file.fileno()


def read(file):
    number, limit_s, what = RECORD.unpack(os.pread(file, RECORD.size, 0))
    return number, limit_s, what.rstrip(b"\0")


def test_a_loop_beats_once_a_second_however_fast_it_turns(file):
    clock = FakeClock()
    beat = Beat(file, 10.0, clock)
    for _ in range(35):
        beat.beat()
        clock.now += 0.1
    assert read(file) == (4, 10.0, b"")


def test_long_work_is_announced_at_once_and_ends_with_its_block(file):
    beat = Beat(file, 10.0, FakeClock())
    beat.beat()
    with contextlib.suppress(ValueError), beat.busy("loading the model", 1800.0):
        assert read(file) == (2, 1800.0, b"loading the model")
        raise ValueError
    assert read(file) == (3, 10.0, b"")


def test_work_that_is_quick_enough_without_it_is_not_announced(file):
    beat = Beat(file, 10.0, FakeClock())
    with beat.busy("computing a step", 10.0):
        assert read(file)[0] == 0


def test_a_process_that_nobody_watches_beats_into_nothing(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    written = []
    monkeypatch.setattr(os, "pwrite", lambda *arguments: written.append(arguments))
    beat = Beat.inherited()
    beat.beat()
    with beat.busy("loading the model", 1800.0):
        beat.beat()
    assert written == []


def test_the_file_is_not_looked_for_by_processes_that_do_not_inherit_it(monkeypatch, file):
    monkeypatch.setenv(VARIABLE, str(file))
    Beat.inherited().beat()
    assert read(file)[0] == 1
    assert VARIABLE not in os.environ
