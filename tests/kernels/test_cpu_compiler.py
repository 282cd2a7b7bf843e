"""The C kernels are built once; if they cannot be built, the error says why."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import compiler
from kernels.cpu.compiler import build_library
from kernels.cpu.errors import Unavailable


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "chorale"


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A compiler that records each call and runs the test's script."""
    path, calls = tmp_path / "fake-cc", tmp_path / "calls"

    def make(script):
        path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "$@" >> {calls}\n{script}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return lambda: calls.read_text().splitlines() if calls.exists() else []

    return make


# Script that writes the file named after -o.
WRITES = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


def test_it_is_built_once(cache, fake_compiler):
    calls = fake_compiler(WRITES)
    library = build_library()
    assert (library.parent, library.read_text()) == (cache, "built\n")
    assert build_library() == library
    assert len(calls()) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_other_sources_are_another_library(cache, fake_compiler, monkeypatch, tmp_path):
    fake_compiler(WRITES)
    library = build_library()
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "gemm.c").write_text("int changed;")
    monkeypatch.setattr(compiler, "_SOURCES", sources)
    assert build_library() != library


def test_a_compiler_that_names_the_processor_in_another_way_is_asked_again(cache, fake_compiler):
    calls = fake_compiler(f'case "$*" in *-march=native*) exit 1;; esac\n{WRITES}')
    assert build_library().exists()
    assert [("-mcpu=native" in call) for call in calls()] == [False, True]


def test_what_does_not_compile_is_said_with_the_compilers_words(cache, fake_compiler):
    fake_compiler("echo 'gemm.c:1: error: out of registers' >&2; exit 1")
    with pytest.raises(Unavailable, match="do not compile: gemm.c:1: error: out of registers"):
        build_library()
    assert not list(cache.iterdir())


def test_without_a_compiler_the_reason_is_said(cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unavailable, match="there is no C compiler"):
        build_library()


def test_a_folder_that_others_can_write_is_refused(cache, fake_compiler):
    """Another user could place a library there, which would be executed."""
    fake_compiler(WRITES)
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(Unavailable, match="can be written by others"):
        build_library()


def test_engines_that_start_together_all_get_it(tmp_path, fake_compiler):
    library, cache = build_library(), tmp_path / "cache" / "chorale"
    fake_compiler(f'while [ "$1" != -o ]; do shift; done; cp {library} "$2"')
    environment = os.environ | {"XDG_CACHE_HOME": str(cache.parent)}
    command = [
        sys.executable,
        "-c",
        "from kernels.cpu.bindings import load_library; load_library()",
    ]
    root = Path(__file__).parents[2]
    starting = [subprocess.Popen(command, cwd=root, env=environment) for _ in range(3)]
    assert [process.wait(timeout=100) for process in starting] == [0, 0, 0]
    assert len(list(cache.glob("*.so"))) == 1
