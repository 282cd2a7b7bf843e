"""The C kernels are compiled once or carried; if they cannot be had, the error says why."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import compiler
from kernels.cpu.compiler import find_library
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
    library = find_library()
    assert (library.parent, library.read_text()) == (cache, "built\n")
    assert find_library() == library
    assert len(calls()) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_other_sources_are_another_library(cache, fake_compiler, monkeypatch, tmp_path):
    fake_compiler(WRITES)
    library = find_library()
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "gemm.c").write_text("int changed;")
    monkeypatch.setattr(compiler, "_SOURCES", sources)
    assert find_library() != library


AVX512 = "fma avx2 avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "features", "level"),
    [
        ("x86_64", f"sse {AVX512} avx512_vnni", "avx512vnni"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", "fma avx2 avx_vnni", "avxvnni"),
        ("x86_64", "fma avx2 avx512f", "avx2"),
        ("x86_64", "sse4_2 avx", "plain"),
        ("aarch64", "", "plain"),
    ],
)
def test_a_processor_gets_the_best_level_that_it_has(
    cache, fake_compiler, machine, features, level
):
    calls = fake_compiler(WRITES)
    assert find_library(machine, features).stem.rpartition("-")[0] == f"kernels-{level}"
    (call,) = calls()
    assert ("-mavx512vnni" in call) == (level == "avx512vnni")


def test_a_compiler_that_is_older_than_the_processor_gets_a_lower_level(cache, fake_compiler):
    fake_compiler(f'case "$*" in *vnni*) exit 1;; esac\n{WRITES}')
    found = find_library("x86_64", f"{AVX512} avx512_vnni")
    assert found.stem.startswith("kernels-avx512-")


def test_what_does_not_compile_is_said_with_the_compilers_words(cache, fake_compiler):
    fake_compiler("echo 'gemm.c:1: error: out of registers' >&2; exit 1")
    with pytest.raises(Unavailable, match="do not compile: gemm.c:1: error: out of registers"):
        find_library()
    assert not list(cache.iterdir())


def test_without_a_compiler_the_reason_is_said(cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unavailable, match="there is no C compiler"):
        find_library()


def test_a_folder_that_others_can_write_is_refused(cache, fake_compiler):
    """Another user could place a library there, which would be executed."""
    fake_compiler(WRITES)
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(Unavailable, match="can be written by others"):
        find_library()


def test_engines_that_start_together_all_get_it(tmp_path, fake_compiler):
    library, cache = find_library(), tmp_path / "cache" / "chorale"
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
