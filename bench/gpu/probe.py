"""Which GPU is here, found out in a child: what touches CUDA cannot be forked any more."""

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
    """The first CUDA device, and what is there to use it.

    arch: its compute capability, 90 for 9.0.   count: how many devices there are.
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
    """Raises NoGpu, with what torch said."""
    ended = child.run(_describe, _TIMEOUT_S)
    if ended.failure is not None:
        raise NoGpu(f"torch finds no CUDA device here; --dry needs none\n{ended.said}")
    return Found(**json.loads(ended.said.splitlines()[-1]))


def _describe() -> None:
    major, minor = torch.cuda.get_device_capability(0)
    name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    found = Found(name, 10 * major + minor, count, torch.__version__, triton.__version__)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
