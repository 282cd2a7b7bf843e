"""An adapter packed into exactly the arena's layout, once, when the engine first gets it."""

import re
from dataclasses import dataclass

import torch

from lora.errors import AdapterError
from lora.layout import ADDRESS_UNIT_BYTES, PROJECTIONS, RANK_ROWS, Layout, Tile
from registry.errors import InvalidAdapter
from registry.peft_format import CanonicalAdapter, lora_names, parse_canonical

_MODULE = re.compile(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True)
class PackedAdapter:
    """slabs: [num_slabs, slab_bytes] uint8 on the host.   scales: [layers, projections]."""

    digest: str
    dtype: torch.dtype
    slabs: torch.Tensor
    tiles: tuple[Tile, ...]
    scales: torch.Tensor
    invocation_tokens: tuple[int, ...] | None = None

    @property
    def num_slabs(self) -> int:
        return self.slabs.shape[0]

    @property
    def size_bytes(self) -> int:
        return self.slabs.numel()

    def tile_table(self, layout: Layout, slab_ids: list[int]) -> torch.Tensor:
        """[layers, projections, tiles] int32 addresses for slabs with places; -1 is no tile."""
        depth = max(tile.index for tile in self.tiles) + 1
        table = torch.full(
            (layout.shape.num_layers, len(PROJECTIONS), depth), -1, dtype=torch.int32
        )
        for tile in self.tiles:
            start = slab_ids[tile.slab] * layout.units_per_slab
            offset = tile.offset_bytes // ADDRESS_UNIT_BYTES
            table[tile.layer, tile.projection, tile.index] = start + offset
        return table


def pack(digest: str, data: bytes, layout: Layout, dtype: torch.dtype) -> PackedAdapter:
    """Pack a canonical object. Raises AdapterError when it is not one of this base model."""
    try:
        adapter = parse_canonical(data)
    except InvalidAdapter as error:
        raise AdapterError("incompatible", str(error)) from error
    places = {name: _place(name, layout) for name in adapter.modules}
    ranks = {places[name]: module.rank for name, module in adapter.modules.items()}
    tiles, num_slabs = layout.pack(ranks)
    slabs = torch.zeros(num_slabs, layout.slab_bytes, dtype=torch.uint8)
    scales = torch.zeros(layout.shape.num_layers, len(PROJECTIONS))
    for name, place in places.items():
        scales[place] = adapter.modules[name].scale
        rows = _rows(adapter, data, name, layout.shape.features(place[1]), dtype)
        for tile in tiles:
            if (tile.layer, tile.projection) == place:
                _write(slabs[tile.slab], tile, *rows)
    return PackedAdapter(digest, dtype, slabs, tuple(tiles), scales)


def _place(name: str, layout: Layout) -> tuple[int, int]:
    """(layer, projection) of a module's name."""
    match = _MODULE.fullmatch(name)
    if not match or match[2] not in PROJECTIONS or int(match[1]) >= layout.shape.num_layers:
        raise AdapterError("incompatible", f"{name} is no projection of this base model")
    return int(match[1]), PROJECTIONS.index(match[2])


def _rows(
    adapter: CanonicalAdapter, data: bytes, name: str, features: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B rank-major [rank, out] of one module, in the arena's dtype."""
    name_a, name_b = lora_names(name)
    a = _tensor(adapter, data, name_a).to(dtype)
    b = _tensor(adapter, data, name_b).T.to(dtype).contiguous()
    if (a.shape[1], b.shape[1]) != features or a.shape[0] != b.shape[0]:
        raise AdapterError(
            "incompatible", f"{name} has shapes {tuple(a.shape)}, {tuple(b.shape)}, not {features}"
        )
    # A slab of the arena may hold KV next, and what is not finite there outlives the adapter.
    if not (a.isfinite().all() and b.isfinite().all()):
        raise AdapterError("incompatible", f"{name} has a value that is too large for {dtype}")
    return a, b


def _tensor(adapter: CanonicalAdapter, data: bytes, name: str) -> torch.Tensor:
    info = adapter.tensors[name]
    flat = torch.frombuffer(
        memoryview(bytearray(data[info.start : info.end])), dtype=_DTYPES[info.dtype]
    )
    return flat.view(info.shape)


def _write(slab: torch.Tensor, tile: Tile, a: torch.Tensor, b: torch.Tensor) -> None:
    """Rank rows [8 index, 8 index + 8) of A, then of B; rows past the rank stay zero."""
    first = tile.index * RANK_ROWS
    num_rows = min(RANK_ROWS, a.shape[0] - first)
    elems = slab[tile.offset_bytes :].view(a.dtype)
    width_a, width_b = a.shape[1], b.shape[1]
    tile_a = elems[: RANK_ROWS * width_a].view(RANK_ROWS, width_a)
    tile_b = elems[RANK_ROWS * width_a : RANK_ROWS * (width_a + width_b)].view(RANK_ROWS, width_b)
    tile_a[:num_rows] = a[first : first + num_rows]
    tile_b[:num_rows] = b[first : first + num_rows]
