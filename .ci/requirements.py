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
# A wheel, unlike a source package, is installed without running its code.
HEAD = "# `make requirements` writes this file.\n--only-binary :all:\n"

_PACKAGE = re.compile(r"^[a-z].*?(?=^[a-z]|\Z)", re.MULTILINE | re.DOTALL)
_OF_CUDA = re.compile(r"torch=|triton=|nvidia-|cuda-")
_ELSEWHERE = re.compile(r"sys_platform == '(win32|emscripten)'")


def main() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--no-annotate", "--generate-hashes", "--universal", "--python-version", "3.11"]
    command += [f"--extra={name}" for name in EXTRAS]
    command += ["--constraint", "constraints.txt", "pyproject.toml", "-"]
    given = "\n".join((TORCH, *build))
    text = subprocess.check_output(command, cwd=ROOT, input=given, text=True)
    found = [package for package in _PACKAGE.findall(text) if not _ELSEWHERE.search(package)]
    for name in ("base", "cuda"):
        chosen = [one for one in found if (_OF_CUDA.match(one) is None) == (name == "base")]
        (ROOT / "deploy" / "requirements" / f"{name}.txt").write_text(HEAD + "".join(chosen))


if __name__ == "__main__":
    main()
