"""Packing of canonical objects into packed files, once for each, outside the engine's process.

The canonical object is mapped, and the packed file written slab by slab, so a large adapter takes
no more memory than a small one. The module does without torch, since the fetcher uses it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.tiles import RANK_ROWS
from lora.errors import AdapterError
from lora.layout import CUT_BY_INPUTS, FUSED, PROJECTIONS, Layout, Place, Tile
from lora.packed import MAX_HEADER_BYTES, PackedForm, PackedHeader
from lora.shard import Shard
from registry.errors import InvalidAdapter
from registry.formats.peft_format import (
    EMBEDDING,
    HEAD,
    MAX_ADDED_TOKENS,
    CanonicalAdapter,
    TensorInfo,
    lora_names,
    open_canonical,
)

_Bytes = npt.NDArray[np.uint8]
_Matrix = npt.NDArray[np.generic]
"""Values in float32, float16, or uint16 for the bits of bfloat16."""

_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")

# numpy has no bfloat16, so its bits are handled as uint16.
_F16, _BF16, _F32 = np.dtype("<f2"), np.dtype("<u2"), np.dtype("<f4")
_STORED: dict[str, np.dtype[np.generic]] = {"F16": _F16, "BF16": _BF16, "F32": _F32}
_ARENA: dict[str, np.dtype[np.generic]] = {"float16": _F16, "bfloat16": _BF16, "float32": _F32}


def pack(
    source: Path, digest: str, form: PackedForm, allocate: Callable[[int], Path]
) -> PackedHeader:
    """Write the packed file of the canonical object at `source`.

    allocate: makes the file, of as many bytes as it will have. Its header is written last, so a
    file cut short has no header.
    Raises AdapterError("incompatible") if the object is no adapter of this base model, or has
    values that the arena's dtype cannot hold.
    """
    try:
        adapter = open_canonical(source)
    except InvalidAdapter as error:
        raise AdapterError("incompatible", str(error)) from error
    modules = _modules(adapter, np.memmap(source, np.uint8, "r"), form.layout)
    tiles, num_slabs = form.layout.pack({place: m.rank for place, m in modules.items()})
    num_shards = form.layout.num_shards
    header = PackedHeader(
        digest=digest,
        base_revision=form.base_revision,
        form_id=form.form_id,
        num_slabs=num_slabs,
        slab_bytes=form.layout.slab_bytes,
        tiles=tuple(tiles),
        scales=tuple((*place, module.scale) for place, module in sorted(modules.items())),
        invocation_tokens=adapter.invocation_tokens,
        checksums=(hashlib.sha256().hexdigest(),) * num_shards,
        num_added=_num_added(adapter, form.layout),
    )
    room = len(header.to_bytes())
    if room > MAX_HEADER_BYTES:
        raise AdapterError("incompatible", f"its {len(tiles)} tiles are too many for a header")
    checksums = []
    with allocate(room + header.slabs_bytes).open("r+b") as target:
        target.seek(room)
        for index in range(num_shards):
            hasher = hashlib.sha256()
            for slab in _slabs(tiles, modules, form, Shard(index, num_shards)):
                hasher.update(slab)
                target.write(slab)
            checksums.append(hasher.hexdigest())
        header = replace(header, checksums=tuple(checksums))
        target.seek(0)
        target.write(header.to_bytes())
    return header


@dataclass(frozen=True)
class _Module:
    """Matrices of a module, or of a chunk of the embedding or the head, as stored.

    a: [rank, in].   b: [rank, out], a transposed view.
    """

    name: str
    scale: float
    a: _Matrix
    b: _Matrix

    @property
    def rank(self) -> int:
        return len(self.a)


_Modules = Mapping[Place, _Module]


def _modules(adapter: CanonicalAdapter, data: _Bytes, layout: Layout) -> _Modules:
    """The adapter's modules by place. data: the file's bytes, mapped.

    A fused module counts as its projections: each has all of A, and its own outputs of B.
    Raises AdapterError("incompatible") if a module or its shape does not match the base model.
    """
    places = _places(layout)
    num_added = _num_added(adapter, layout)
    hidden, vocab_size = layout.shape.hidden_size, layout.vocab_size + num_added
    modules: dict[Place, _Module] = {}
    for name, effect in adapter.modules.items():
        a, b = (_matrix(data, adapter.tensors[tensor]) for tensor in lora_names(name))
        module = _Module(name, effect.scale, a, b.T)
        if name in places and not any(place in modules for place in places[name]):
            num_inputs, num_outputs = zip(
                *(layout.shape.features(projection) for _, projection in places[name]), strict=True
            )
            _check_shape(module, (num_inputs[0], sum(num_outputs)), effect.rank)
            ends = accumulate(num_outputs)
            for place, width, end in zip(places[name], num_outputs, ends, strict=True):
                modules[place] = replace(module, b=module.b[:, end - width : end])
        elif name == HEAD and vocab_size:
            _check_shape(module, (hidden, vocab_size), effect.rank)
            of_added, _ = layout.added_places
            for place, tokens in _chunks(module.b, layout, layout.head_places, of_added):
                modules[place] = replace(module, b=tokens)
        elif name == EMBEDDING and vocab_size:
            _check_shape(module, (vocab_size, hidden), effect.rank)
            _, of_added = layout.added_places
            for place, tokens in _chunks(module.a, layout, layout.embedding_places, of_added):
                modules[place] = replace(module, a=tokens)
        elif name in (HEAD, EMBEDDING):
            raise AdapterError("incompatible", f"LoRA on {name} is served on CPUs only")
        else:
            raise AdapterError("incompatible", f"{name} is no projection of this base model")
    return modules


def _num_added(adapter: CanonicalAdapter, layout: Layout) -> int:
    """Tokens that the adapter adds. Raises AdapterError("incompatible") if there is no room."""
    if adapter.vocab_size is None:
        return 0
    if not layout.vocab_size:
        raise AdapterError("incompatible", "tokens added to the vocabulary are served on CPUs only")
    num_added = adapter.vocab_size - layout.vocab_size
    if not 0 < num_added <= MAX_ADDED_TOKENS:
        raise AdapterError(
            "incompatible",
            f"it has {adapter.vocab_size} tokens, the base model {layout.vocab_size}",
        )
    return num_added


def _chunks(
    rows: _Matrix, layout: Layout, places: Sequence[Place], of_added: Place
) -> Iterator[tuple[Place, _Matrix]]:
    """The columns of each chunk of the vocabulary, of [rank, tokens]; added tokens come last."""
    for place, tokens in zip(places, layout.chunks, strict=True):
        yield place, rows[:, tokens.start : tokens.stop]
    added = rows[:, layout.vocab_size :]
    if added.shape[1]:
        yield of_added, np.pad(added, ((0, 0), (0, MAX_ADDED_TOKENS - added.shape[1])))


def _check_shape(module: _Module, features: tuple[int, int], rank: int) -> None:
    """Check a whole module's shapes. Raises AdapterError("incompatible")."""
    found = (*module.a.shape, *module.b.shape)
    if found != (rank, features[0], rank, features[1]):
        raise AdapterError(
            "incompatible",
            f"{module.name} has shapes {module.a.shape}, {module.b.T.shape}, not those of "
            f"{features}",
        )


def _places(layout: Layout) -> dict[str, list[Place]]:
    """Layer and projection of every module name; several projections if the module is fused."""
    names = {name: (p,) for p, name in enumerate(PROJECTIONS)} | FUSED
    return {
        f"model.layers.{layer}.{'mlp' if name in _MLP else 'self_attn'}.{name}": [
            (layer, p) for p in projections
        ]
        for layer in range(layout.shape.num_layers)
        for name, projections in names.items()
    }


def _matrix(data: _Bytes, info: TensorInfo) -> _Matrix:
    return data[info.start : info.end].view(_STORED[info.dtype]).reshape(info.shape)


def _slabs(
    tiles: Sequence[Tile], modules: _Modules, form: PackedForm, shard: Shard
) -> Iterator[memoryview]:
    """Slabs of a shard, one after the other; bytes that no tile covers are zero."""
    in_order = sorted(tiles, key=lambda tile: tile.slab)
    for _, in_slab in groupby(in_order, key=lambda tile: tile.slab):
        slab = np.zeros(form.layout.slab_bytes, np.uint8)
        for tile in in_slab:
            _write(slab, tile, modules[tile.layer, tile.projection], form, shard)
        yield slab.data


def _write(slab: _Bytes, tile: Tile, module: _Module, form: PackedForm, shard: Shard) -> None:
    """Write the shard's part of rank rows [8 index, 8 index + 8) of A, then of B, to the slab; rows
    past the rank stay zero.
    """
    tile_rows = slice(tile.index * RANK_ROWS, (tile.index + 1) * RANK_ROWS)
    a, b = module.a[tile_rows], module.b[tile_rows]
    if tile.layer >= form.layout.shape.num_layers:
        pass  # the ends are whole on every rank
    elif tile.projection in CUT_BY_INPUTS:
        a = a[:, shard.part(a.shape[1])]
    else:
        b = b[:, shard.part(b.shape[1])]
    place = slab[tile.offset_bytes :].view(_ARENA[form.dtype])
    for part, start in ((a, 0), (b, RANK_ROWS * a.shape[1])):
        rows = convert(part, form.dtype)
        # A slab may hold KV next, and values that are not finite would outlive the adapter there.
        if not _is_finite(rows):
            raise AdapterError(
                "incompatible", f"{module.name} has a value that is too large for {form.dtype}"
            )
        place[start:][: rows.size].reshape(rows.shape)[:] = rows


def convert(values: _Matrix, dtype: str) -> _Matrix:
    """Convert to the arena's dtype, rounding to nearest even, bit for bit like torch's `.to()`.

    Argument and result are float32, float16, or uint16 for the bits of bfloat16. Values that are
    too large become infinite.
    """
    if values.dtype == _ARENA[dtype]:
        return values
    if values.dtype == _BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16":
            return _bfloat16_bits(values.astype(np.float32))
        return values.astype(_ARENA[dtype])


def _bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 values to bfloat16 bits, to nearest even. NaN becomes 0x7FC0, as in torch."""
    bits = values.view(np.uint32)
    to_even = (bits >> 16) & 1
    rounded = ((bits + 0x7FFF + to_even) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_finite(values: _Matrix) -> bool:
    if values.dtype == _BF16:
        return bool(((values.view(np.uint16) & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(values).all())
