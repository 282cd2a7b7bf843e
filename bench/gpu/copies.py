"""Slabs copied on the device, and an adapter brought from pinned host memory."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.gpu import goals
from bench.gpu.adapters import make_form, num_slabs
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import check_equal
from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.report import rounded
from kernels.gpu import ops
from lora.layout import Layout

_RANK = 16


def rows(machine: Machine, ceilings: Ceilings) -> Iterator[Row]:
    yield Row("gpu.copy_slabs", {}, partial(_copy_slabs, machine, ceilings))
    for pieces in ("slabs", "whole"):
        measure = partial(_page_in, machine, ceilings, pieces)
        yield Row("gpu.page_in", {"rank": _RANK, "pieces": pieces}, measure)


def _layout(machine: Machine) -> Layout:
    return make_form(machine, Layout.of(machine.shape, machine.dtype.itemsize)).layout


def _random_slabs(machine: Machine, count: int) -> torch.Tensor:
    slab_bytes = _layout(machine).slab_bytes
    there = machine.there
    return torch.randint(256, (count, slab_bytes), dtype=torch.uint8, device=there)


def _copy_slabs(machine: Machine, ceilings: Ceilings) -> dict[str, Any]:
    count = machine.copies(_layout(machine).slab_bytes)
    source = _random_slabs(machine, count)
    target = torch.zeros_like(source)
    to, start = (torch.randperm(count, device=machine.there).int() for _ in range(2))
    work = partial(ops.copy_slabs, target, to, source, start)
    machine.run(work)
    check_equal("copied slabs", target[to], source[start])
    moved = 2 * source.nbytes
    seconds = machine.seconds(work)
    share = goals.floor_s(moved, ceilings.copied_per_s) / seconds
    return {"gb_per_s": rounded(moved / seconds / 1e9), "share_of_copy": rounded(share)}


def _page_in(machine: Machine, ceilings: Ceilings, pieces: str) -> dict[str, Any]:
    """Measure the copy of an adapter from pinned host memory into the arena.

    pieces: "slabs": the slabs lie apart in the arena, as after many evictions; "whole": side by
    side.
    """
    count = num_slabs(_layout(machine), [_RANK])
    arena = torch.zeros_like(_random_slabs(machine, 2 * count))
    host = machine.device.pinned(count, arena.shape[1], dtype=torch.uint8).random_()
    targets = [arena[:count]] if pieces == "whole" else list(arena[::2])
    sources = [host] if pieces == "whole" else list(host)

    def work() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    machine.run(work)
    for target, source in zip(targets, sources, strict=True):
        check_equal("the adapter", target.cpu(), source)
    per_s = host.nbytes / machine.seconds(work)
    share = per_s / ceilings.pinned_per_s
    return {
        "mb": rounded(host.nbytes / 1e6),
        "gb_per_s": rounded(per_s / 1e9),
        "share_of_pinned": rounded(share),
        "goals": {"page_in": goals.at_least(share, goals.SHARE_OF_COPY)},
    }
