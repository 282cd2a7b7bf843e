"""Installs torch into the environment that runs this file, with the smallest download that works.

With an NVIDIA driver it takes the package index's build; without one that of PyTorch's CPU index,
if that index answers; else the package index's build, which on Linux can be large: the script says
so before the download.
"""

import importlib.metadata
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from shutil import which
from typing import Any

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_TIMEOUT_S = 5
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def main() -> int:
    if is_installed():
        say(f"{TORCH} is installed.")
        return 0
    if has_nvidia_driver():
        say(f"{TORCH}: there is an NVIDIA driver, so CUDA's build (2.7 GB with its packages).")
        return install()
    if sys.platform == "linux" and answers(f"{CPU_INDEX}/torch/"):
        say(f"{TORCH}: the CPU build from {CPU_INDEX} (200 MB).")
        return install("--extra-index-url", CPU_INDEX)
    say(f"{TORCH}: {describe(resolve())}.")
    return install()


def is_installed() -> bool:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return version.partition("+")[0] == TORCH.partition("==")[2]


def has_nvidia_driver() -> bool:
    return which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def answers(url: str) -> bool:
    """Whether the URL answers; asked once, since in a closed network every retry is a wait."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def resolve() -> dict[str, Any]:
    """The entry for torch in pip's report of what it would install; {} if there is no report."""
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-")
    report = subprocess.run(
        (*PIP, "install", *options, TORCH), stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        found: dict[str, Any] = json.loads(report.stdout)["install"][0]
    except (ValueError, KeyError, IndexError):
        return {}
    return found


def describe(found: dict[str, Any]) -> str:
    """A description of the build that is about to be downloaded."""
    url = found.get("download_info", {}).get("url", "")
    metadata = found.get("metadata", {})
    version = metadata.get("version", "")
    needs_cuda = any(
        name.startswith(("nvidia-", "cuda-")) for name in metadata.get("requires_dist", [])
    )
    if url.startswith("file:"):
        return f"a local wheel, {version}"
    if needs_cuda:
        return (
            "PyTorch's CPU index does not answer, so the package index's build for CUDA: "
            "2.7 GB with its packages. This takes a while"
        )
    return f"{version or 'the build'} of the package index"


def install(*options: str) -> int:
    command = (*PIP, "install", "-c", str(CONSTRAINTS), *options, TORCH)
    return subprocess.run(command, check=False).returncode


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
