"""`python -m bench.gpu.lease.pack [--ptxas FILE]`: makes build/gpu-pack, which is taken along:
packages of the server, for Python 3.12, that a machine with torch may lack, and a ptxas.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path(__file__).parents[3]
FOLDER = _ROOT / "build" / "gpu-pack"

_MOST_BYTES = 64 << 20
"""Most that may be sent to the machine, together with the tree that git knows."""
PACKAGES = (
    "alembic", "annotated-types", "cffi", "cryptography", "fastapi", "google-re2", "greenlet",
    "httptools", "llguidance", "mako", "msgspec", "opentelemetry-api", "pycparser", "pydantic",
    "pydantic-core", "pyzmq", "redis", "sqlalchemy", "starlette", "typing-extensions",
    "typing-inspection", "uvicorn",
)  # fmt: skip
THERE = (
    "annotated-doc", "anyio", "click", "h11", "httpx", "huggingface-hub", "jinja2", "markupsafe",
    "numpy", "prometheus-client", "rich", "safetensors", "tiktoken", "tokenizers", "torch",
    "typer", "uvloop",
)  # fmt: skip
"""Packages of the server that a machine with torch, transformers and peft is taken to have."""
_PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))
"""Platforms of wheels for a glibc of up to 2.39, as pip names them."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu.lease.pack", description=__doc__)
    parser.add_argument("--ptxas", type=Path, help="a ptxas to try where Triton's own may be wrong")
    options = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    subprocess.run(_download(), check=True)
    if options.ptxas:
        shutil.copy2(options.ptxas, FOLDER / "ptxas")
    line, is_small = describe(_size_bytes(FOLDER.iterdir()), _size_bytes(_tree()))
    sys.stdout.write(f"{FOLDER.relative_to(_ROOT)}: {line}\n")
    if not is_small:
        sys.stdout.write(f"That is more than {_MOST_BYTES >> 20} MiB.\n")
    return 0 if is_small else 1


def describe(pack_bytes: int, tree_bytes: int) -> tuple[str, bool]:
    """Return the sizes in words, and whether both can be sent."""
    whole = pack_bytes + tree_bytes
    sizes = f"{pack_bytes / (1 << 20):.1f} MiB, with the tree {whole / (1 << 20):.1f} MiB"
    return sizes, whole <= _MOST_BYTES


def _download() -> list[str]:
    platforms = [f"--platform={name}_x86_64" for name in _PLATFORMS]
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
        "--no-deps", "--only-binary=:all:", "--implementation=cp", "--python-version=3.12",
        *platforms, f"--dest={FOLDER}", *requirements((_ROOT / "constraints.txt").read_text()),
    ]  # fmt: skip


def requirements(constraints: str) -> list[str]:
    """Return the packages, each with the version that the constraints name."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE)
    versions = {normalized(name): version for name, version in found}
    return [f"{name}=={versions[name]}" for name in PACKAGES]


def normalized(name: str) -> str:
    """Return a package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _tree() -> list[Path]:
    """Return the files that git knows, or would if they were added."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in names.split("\0") if name and (path := _ROOT / name).is_file()]


def _size_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


if __name__ == "__main__":
    sys.exit(main())
