"""The C kernels, built once for this processor and kept in the user's cache folder."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernels.cpu.errors import Unavailable

_SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
"""Flags of every compiler, on every processor."""
_TIMEOUT_S = 120.0
_VARIANTS = ("-march=native", "-mcpu=native")
"""How compilers name this processor; the first one that compiles is used."""


def build_library() -> Path:
    """Path of the library; builds it, in 2 s, unless it exists for this source, compiler and CPU.

    Raises Unavailable with the reason.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which(compiler) is None:
        raise Unavailable("there is no C compiler")
    folder = _cache_folder()
    library = folder / f"kernels-{_fingerprint(compiler)}.so"
    if not library.exists():
        _build(compiler, library)
    return library


def _build(compiler: str, library: Path) -> None:
    sources = sorted(str(path) for path in _SOURCES.glob("*.c"))
    reason = ""
    # The library gets its name when it is complete: another engine may be looking for it now.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        target = Path(folder) / library.name
        for variant in _VARIANTS:
            command = [compiler, *FLAGS, variant, *sources, "-o", str(target), "-lm"]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Unavailable(f"the C compiler fails: {error}") from error
            if done.returncode == 0:
                target.replace(library)
                return
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            reason = reason or said[-1]
    raise Unavailable(f"the C kernels do not compile: {reason}")


def _fingerprint(compiler: str) -> str:
    """Hash of everything that the library depends on."""
    hasher = hashlib.sha256()
    for path in sorted(_SOURCES.iterdir()):
        hasher.update(path.read_bytes())
    version = subprocess.run((compiler, "--version"), capture_output=True, check=False).stdout
    hasher.update(repr((compiler, version, FLAGS, _VARIANTS, _processor())).encode())
    return hasher.hexdigest()[:16]


def _processor() -> str:
    """Name and features of the processor, because machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "".join(sorted({line for line in lines if line.startswith(wanted)}))


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
