"""Writes deploy/requirements/base.txt and cuda.txt: the packages of the image, with hashes.

The hashes are those of files for every processor and for each Python that pyproject.toml allows.
The build of torch for a CPU is not on the package index, so cpu.txt is kept by hand.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from install_torch import TORCH

ROOT = Path(__file__).parents[1]
EXTRAS = ("gpu", "parquet", "postgres", "s3")

_PACKAGE = re.compile(r"^[a-z].*?(?=^[a-z]|\Z)", re.MULTILINE | re.DOTALL)
_OF_CUDA = re.compile(r"torch=|triton=|nvidia-|cuda-")
_ELSEWHERE = re.compile(r"sys_platform == '(win32|emscripten)'")


def main() -> None:
    found = [text for text in _PACKAGE.findall(resolve()) if not _ELSEWHERE.search(text)]
    for name in ("base", "cuda"):
        chosen = [text for text in found if (_OF_CUDA.match(text) is None) == (name == "base")]
        # A wheel, unlike a source package, is installed without running its code.
        head = "# `make requirements` writes this file.\n--only-binary :all:\n"
        (ROOT / "deploy" / "requirements" / f"{name}.txt").write_text(head + "".join(chosen))


def resolve() -> str:
    """Return every package that pyproject.toml and its build need, as constraints.txt says."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--no-annotate", "--generate-hashes", "--universal", "--python-version", "3.11"]
    command += [word for extra in EXTRAS for word in ("--extra", extra)]
    command += ["--constraint", "constraints.txt", "pyproject.toml", "-"]
    given = "\n".join((TORCH, *build))
    return subprocess.run(
        command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
