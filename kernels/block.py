"""Blocks of a step's tokens as records, and plain-torch reads of the tables that they point to."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kernels.work import LoRAWork, Site

BLOCK = np.dtype(
    [
        ("first", "<i4"),
        ("tokens", "<i4"),
        ("depth", "<i8"),
        ("tile_table", "<i8"),
        ("scales", "<i8"),
    ]
)
"""Adjacent tokens of one adapter and the addresses of its tables; a kernel loads it as a whole.

tile_table: address of [layers, projections, depth] int32, a tile's place, -1 for none; a module's
tiles come first.   scales: address of [layers, projections] float32.   depth: 0 for tokens of the
base model, whose addresses are never read.
"""


def adapter_blocks(work: LoRAWork) -> list[np.void]:
    """Blocks of a step that have an adapter, as BLOCK records."""
    blocks = work.blocks[: int(work.counts[0])].cpu().numpy().view(BLOCK)[:, 0]
    return list(blocks[blocks["depth"] > 0])


def places_of(work: LoRAWork, site: Site, block: np.void, number: int) -> list[int]:
    """Places of the tiles of the site's projection `number`; -1 after the last tile."""
    depth = int(block["depth"])
    address = int(block["tile_table"]) + 4 * _line(site, number) * depth
    return _read(address, depth, np.dtype(np.int32), work.arena.device)


def scale_of(work: LoRAWork, site: Site, block: np.void, number: int) -> float:
    """The factor of the site's projection `number`."""
    address = int(block["scales"]) + 4 * _line(site, number)
    (scale,) = _read(address, 1, np.dtype(np.float32), work.arena.device)
    return float(scale)


def _read(address: int, count: int, dtype: np.dtype[Any], device: torch.device) -> list[Any]:
    """Numbers that lie at an address of a device's memory."""
    if device.type == "cpu":
        values: list[Any] = np.ctypeslib.as_array(
            (np.ctypeslib.as_ctypes_type(dtype) * count).from_address(address)
        ).tolist()
        return values
    # The CUDA array interface, version 3; torch takes writable memory only.
    where = {"shape": (count,), "typestr": dtype.str, "data": (address, False), "version": 3}
    there = SimpleNamespace(__cuda_array_interface__=where)
    values = torch.as_tensor(there, device=device).tolist()
    return values


def _line(site: Site, number: int) -> int:
    return site.layer * site.num_projections + site.projections[number]
