"""The blocks of a step's tokens as records, and how a record in host memory is read."""

import ctypes

import numpy as np

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
"""Neighbouring tokens of one adapter, with all that leads to its tiles: kernels read it at once.

tile_table: address of [layers, projections, depth] int32, a tile's place, -1 for none; a module's
tiles come first.   scales: address of [layers, projections] float32.   depth: 0 for tokens of the
base model, whose addresses are never read from.
"""


def adapter_blocks(work: LoRAWork) -> list[np.void]:
    """The blocks of a step that have an adapter, a BLOCK each."""
    blocks = work.blocks[: int(work.counts[0])].numpy().view(BLOCK)[:, 0]
    return list(blocks[blocks["depth"] > 0])


def places_of(site: Site, block: np.void, number: int) -> list[int]:
    """Where the tiles of the site's projection `number` lie; -1 behind the last one."""
    depth = int(block["depth"])
    address = int(block["tile_table"]) + 4 * _line(site, number) * depth
    return list((ctypes.c_int32 * depth).from_address(address))


def scale_of(site: Site, block: np.void, number: int) -> float:
    """The factor of the site's projection `number`."""
    address = int(block["scales"]) + 4 * _line(site, number)
    return float(ctypes.c_float.from_address(address).value)


def _line(site: Site, number: int) -> int:
    return site.layer * site.num_projections + site.projections[number]
