"""Ceilings of this GPU, measured first: other figures are given as shares of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.report import rounded

ROW = "gpu.ceilings"


@dataclass(frozen=True)
class Ceilings:
    """Rates of the GPU per second: bytes that a copy on the GPU reads and writes, FLOPs of a large
    product. A rate that could not be measured is NaN.
    """

    copied_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, result: Mapping[str, float]) -> "Ceilings":
        return cls(
            1e9 * result.get("copy_gb_per_s", math.nan),
            1e12 * result.get("matmul_tflops", math.nan),
        )


def row(machine: Machine) -> Row:
    size_bytes, side, pinned_bytes = machine.pick(
        (1 << 30, 8192, 256 << 20), (1 << 16, 64, 1 << 16)
    )
    setup = {
        "copied_bytes": size_bytes,
        "matmul": f"{side} x {side} x {side} {machine.dtype_name}",
        "pinned_bytes": pinned_bytes,
    }
    return Row(ROW, setup, partial(_measure, machine, size_bytes, side, pinned_bytes))


def _measure(machine: Machine, size_bytes: int, side: int, pinned_bytes: int) -> dict[str, float]:
    copied = 2 * size_bytes / machine.seconds(_copy(machine, size_bytes))
    left, right = machine.randn(side, side), machine.randn(side, side, std=side**-0.5)
    multiplied = 2 * side**3 / machine.seconds(partial(torch.mm, left, right))
    host = machine.device.pinned(pinned_bytes, dtype=torch.uint8).random_()
    target = torch.empty_like(host, device=machine.there)
    pinned = pinned_bytes / machine.seconds(partial(target.copy_, host, non_blocking=True))
    return {
        "copy_gb_per_s": rounded(copied / 1e9),
        "matmul_tflops": rounded(multiplied / 1e12),
        "pinned_gb_per_s": rounded(pinned / 1e9),
    }


def _copy(machine: Machine, size_bytes: int) -> "partial[torch.Tensor]":
    source = machine.randn(size_bytes // machine.dtype.itemsize)
    return partial(torch.empty_like(source).copy_, source)
