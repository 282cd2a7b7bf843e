"""The GPU of this machine, probed in a child, since a process that uses CUDA cannot be forked."""

import json
import sys
from dataclasses import asdict, dataclass

import torch
import triton

from bench import child

_TIMEOUT_S = 120.0


class NoGpu(Exception):
    """There is no CUDA device that torch could use."""


@dataclass(frozen=True)
class Found:
    """The first CUDA device, and the versions of torch and Triton.

    arch: compute capability of the device, 90 for 9.0.   count: number of devices.
    """

    name: str
    arch: int
    count: int
    torch: str
    triton: str

    def __str__(self) -> str:
        return (
            f"{self.count} x {self.name}, sm_{self.arch}, torch {self.torch}, triton {self.triton}"
        )


def probe() -> Found:
    """Return this machine's GPU. Raises NoGpu, with torch's output."""
    ended = child.run(_describe, _TIMEOUT_S)
    if ended.failure is not None:
        raise NoGpu(f"torch finds no CUDA device here; use --dry to do without\n{ended.said}")
    return Found(**json.loads(ended.said.splitlines()[-1]))


def _describe() -> None:
    major, minor = torch.cuda.get_device_capability(0)
    name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    found = Found(name, 10 * major + minor, count, torch.__version__, triton.__version__)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
