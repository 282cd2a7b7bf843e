"""The library of C kernels: one that the wheel carries, or one that is compiled at the first use.

A level is a set of instructions that a processor may have. Each level has a library of its own; the
best one whose instructions the processor has is used.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kernels.cpu.errors import Unavailable

_SOURCES = Path(__file__).parent / "csrc"
CARRIED = Path(__file__).parent / "lib"
"""Folder of the libraries that a wheel carries; a checkout has none."""
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
"""Flags of every compiler, on every processor."""
_TIMEOUT_S = 120.0

_AVX2 = ("avx2", "fma")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_LEVELS = {
    "x86_64": {
        "avx512vnni": (*_AVX512, "avx512_vnni"),
        "avx512": _AVX512,
        "avxvnni": (*_AVX2, "avx_vnni"),
        "avx2": _AVX2,
    }
}
"""Levels of machines, the best first, with what Linux calls their instructions."""


def levels_of(machine: str) -> Mapping[str, tuple[str, ...]]:
    """Levels of a machine such as x86_64, the best first; every processor has the last one."""
    return {**_LEVELS.get(machine, {}), "plain": ()}


def find_library(machine: str | None = None, features: str | None = None) -> Path:
    """Path of the library for this processor; compiles it, in 2 s, unless it is carried or kept.

    machine, features: other ones than this processor's.   Raises Unavailable with the reason.
    """
    has = set((_features() if features is None else features).split())
    levels = {
        name: needed
        for name, needed in levels_of(machine or platform.machine()).items()
        if has.issuperset(needed)
    }
    for name in levels:
        if (carried := CARRIED / f"kernels-{name}.so").exists():
            return carried
    return _compiled(levels)


def find_compiler() -> str:
    """The C compiler's command. Raises Unavailable."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which(compiler) is None:
        raise Unavailable("there is no C compiler")
    return compiler


def compile_library(compiler: str, features: tuple[str, ...], target: Path) -> None:
    """Compile the library for processors with these instructions. Raises Unavailable."""
    sources = sorted(str(path) for path in _SOURCES.glob("*.c"))
    command = [compiler, *FLAGS, *_flags(features), *sources, "-o", str(target), "-lm"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the C compiler fails: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise Unavailable(f"the C kernels do not compile: {said[-1]}")


def _flags(features: tuple[str, ...]) -> list[str]:
    return [f"-m{feature.replace('_', '')}" for feature in features]


def _compiled(levels: Mapping[str, tuple[str, ...]]) -> Path:
    """The library of the first of the levels that compiles, kept in the user's cache folder."""
    compiler = find_compiler()
    folder, fingerprint = _cache_folder(), _fingerprint(compiler)
    reasons = []
    for name, features in levels.items():
        library = folder / f"kernels-{name}-{fingerprint}.so"
        if library.exists():
            return library
        # The library gets its name when it is complete: another engine may look for it now.
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            target = Path(unfinished) / library.name
            try:
                compile_library(compiler, features, target)
            except Unavailable as reason:  # a compiler that is older than the processor
                reasons.append(reason)
            else:
                return target.replace(library)
    raise reasons[0]


def _fingerprint(compiler: str) -> str:
    """Hash of everything but its level that a library depends on."""
    hasher = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        hasher.update(path.read_bytes())
    version = subprocess.run((compiler, "--version"), capture_output=True, check=False).stdout
    hasher.update(repr((compiler, version, FLAGS, platform.machine())).encode())
    return hasher.hexdigest()[:16]


def _features() -> str:
    """Instructions of this processor as Linux names them, separated by spaces."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")


def _cache_folder() -> Path:
    """Folder of the library; only this user may write to it, because its files are executed."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "chorale"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise Unavailable(f"no folder for the C kernels: {error}") from error
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise Unavailable(f"{folder} can be written by others: chmod 700 it")
    if not os.access(folder, os.W_OK):
        raise Unavailable(f"{folder} cannot be written")
    return folder
