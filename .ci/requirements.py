"""Writes deploy/requirements/: every package of the image, with the hashes of its files.

These are files for every processor and for each Python that pyproject.toml allows. The build of
torch for a CPU is not on the package index, so cpu.txt is kept by hand.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from install_torch import TORCH

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "requirements"
EXTRAS = ("gpu", "parquet", "postgres", "s3")
HEADS = {
    "base": "All packages of the image but torch. `make requirements` writes this file.",
    "cuda": "torch for a GPU, with its packages. `make requirements` writes this file.",
}

_PACKAGE = re.compile(r"^[a-z].*?(?=^[a-z]|\Z)", re.MULTILINE | re.DOTALL)
_OF_CUDA = re.compile(r"torch=|triton=|nvidia-|cuda-")
_ELSEWHERE = re.compile(r"sys_platform == '(win32|emscripten)'")


def main() -> int:
    found = [text for text in _PACKAGE.findall(resolve()) if not _ELSEWHERE.search(text)]
    for name, head in HEADS.items():
        chosen = [text for text in found if bool(_OF_CUDA.match(text)) == (name == "cuda")]
        # Only a wheel is installed without running code of its package.
        text = f"# {head}\n--only-binary :all:\n{''.join(chosen)}"
        (FOLDER / f"{name}.txt").write_text(text)
    return 0


def resolve() -> str:
    """Return every package that pyproject.toml and its build ask for, as constraints.txt says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    options = ("--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate")
    command = (
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", *options),
        *("--constraint", "constraints.txt", *extras, "pyproject.toml", "-"),
    )
    needed = "\n".join((TORCH, *project["build-system"]["requires"]))
    done = subprocess.run(
        command, cwd=ROOT, input=needed, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
