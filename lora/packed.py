"""Packed files, which hold an adapter in exactly the arena's layout: their form and header.

    magic, header's length, header's sha256 | header: JSON, then zeros | slabs, one after another
    0                                       48                         a multiple of 4096

The header states which adapter was packed, for which arena, where its tiles lie, and the slabs'
checksums. If several ranks share the model, the slabs are those of the first rank's shard, then as
many of the second's, and so on; a rank reads only its own.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from lora.errors import AdapterError
from lora.layout import Layout, ModelShape, Tile

MAX_HEADER_BYTES = 16 << 20
"""Limit of a header; the largest adapters (126 layers, rank 256, all projections) need 1 MB."""

_MAGIC = b"CHORPK02"
_PAGE_BYTES = 4096
_PREFIX_BYTES = len(_MAGIC) + 8 + hashlib.sha256().digest_size


@dataclass(frozen=True)
class PackedForm:
    """Properties in which a packed file and the arena that it is copied to must agree.

    dtype: of the adapters in the arena: "float32", "float16" or "bfloat16".
    """

    layout: Layout
    dtype: str
    base_revision: str

    @cached_property
    def form_id(self) -> str:
        """Hash of the form: a packed file can be copied into any arena with the same form id."""
        text = json.dumps({"format": _MAGIC.decode(), **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> "PackedForm":
        """Read what `asdict` made."""
        sizes = form["layout"]
        layout = Layout(**{**sizes, "shape": ModelShape(**sizes["shape"])})
        return cls(layout, form["dtype"], form["base_revision"])


@dataclass(frozen=True)
class PackedHeader:
    """Header of a packed file.

    num_slabs: slabs of one shard.   scales: (layer, projection, scale), float32 values.
    checksums: for each shard the sha256 of its slabs, hex.
    invocation_tokens: tokens at which an activated LoRA begins to apply; None for an ordinary LoRA.
    num_added: tokens that it adds to the base model's.
    """

    digest: str
    base_revision: str
    form_id: str
    num_slabs: int
    slab_bytes: int
    tiles: tuple[Tile, ...]
    scales: tuple[tuple[int, int, float], ...]
    invocation_tokens: tuple[int, ...] | None
    checksums: tuple[str, ...]
    num_added: int = 0

    @property
    def slabs_bytes(self) -> int:
        """Bytes of all shards' slabs together."""
        return len(self.checksums) * self.num_slabs * self.slab_bytes

    def to_bytes(self) -> bytes:
        """Bytes of the file up to its slabs; their number is the same whatever the checksums."""
        tiles = [(t.layer, t.projection, t.index, t.slab, t.offset_bytes) for t in self.tiles]
        text = json.dumps({**vars(self), "tiles": tiles}, separators=(",", ":")).encode()
        prefix = _MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
        return prefix + text + bytes(_padding(len(text)))


def read_header(file: BinaryIO) -> PackedHeader:
    """Read and check the header of a packed file; `file` is left at the first byte of the slabs.

    Raises AdapterError("lost") unless the file is complete and of this format.
    """
    prefix = file.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES or not prefix.startswith(_MAGIC):
        raise _lost("is no packed adapter")
    length = int.from_bytes(prefix[len(_MAGIC) :][:8], "little")
    if length > MAX_HEADER_BYTES:
        raise _lost(f"claims a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
    text = file.read(length)
    if hashlib.sha256(text).digest() != prefix[len(_MAGIC) + 8 :]:
        raise _lost("has a damaged header")
    header = _parse(text)
    slabs_start = file.seek(_padding(length), os.SEEK_CUR)
    size_bytes = slabs_start + header.slabs_bytes
    if file.seek(0, os.SEEK_END) != size_bytes:
        raise _lost(f"is not of the {size_bytes} bytes that its header describes")
    file.seek(slabs_start)
    return header


def slabs_bytes(path: Path) -> int:
    """Bytes of all shards' slabs in a packed file; 0 if it has no header.

    Raises FileNotFoundError.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        length = int.from_bytes(prefix[len(_MAGIC) :][:8], "little")
        slabs_start = _PREFIX_BYTES + length + _padding(length)
        return max(0, file.seek(0, os.SEEK_END) - slabs_start)


def check_header(header: PackedHeader, digest: str, form: PackedForm) -> None:
    """Raise AdapterError("lost") unless this is the header of `digest`, packed for this arena."""
    layout = form.layout
    found = (header.digest, header.base_revision, header.form_id)
    sizes = (header.slab_bytes, len(header.checksums))
    wanted = (digest, form.base_revision, form.form_id)
    if found != wanted or sizes != (layout.slab_bytes, layout.num_shards):
        raise _lost(f"holds {header.digest} in the form {header.form_id}, not what it is named for")


def _parse(text: bytes) -> PackedHeader:
    try:
        fields = json.loads(text)
        tokens = fields["invocation_tokens"]
        fields["tiles"] = tuple(Tile(*tile) for tile in fields["tiles"])
        fields["scales"] = tuple((layer, p, scale) for layer, p, scale in fields["scales"])
        fields["checksums"] = tuple(fields["checksums"])
        fields["invocation_tokens"] = None if tokens is None else tuple(tokens)
        return PackedHeader(**fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _lost(f"has a header that cannot be read ({error})") from error


def _padding(header_bytes: int) -> int:
    return -(_PREFIX_BYTES + header_bytes) % _PAGE_BYTES


def _lost(reason: str) -> AdapterError:
    return AdapterError("lost", f"the packed file {reason}")
