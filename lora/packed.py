"""An adapter packed into exactly the arena's layout, as a file: its form and its header.

    magic, header's length, header's sha256 | header: JSON, then zeros | slabs, one after another
    0                                       48                         a multiple of 4096

The header says what was packed, for which arena, where its tiles lie, and the slabs' checksums.
Where several ranks share the model, the slabs are those of the first rank's shard, then as many of
the second's, and so on: a rank reads its own only.
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
"""The largest adapters served (126 layers, rank 256, every projection) need about 1 MB."""

_MAGIC = b"CHORPK02"
_PAGE_BYTES = 4096
_CUT = "A by inputs or B by outputs"
"""How tiles are cut for several ranks. Files for a single one are the same, however others are."""
_PREFIX_BYTES = len(_MAGIC) + 8 + hashlib.sha256().digest_size


@dataclass(frozen=True)
class PackedForm:
    """What packed bytes must agree on with the arena they go to.

    dtype: the arena's, "float32", "float16" or "bfloat16".
    """

    layout: Layout
    dtype: str
    base_revision: str

    @cached_property
    def form_id(self) -> str:
        """Names the form: adapters packed under one id can be copied into any such arena."""
        cut = {"cut": _CUT} if self.layout.num_shards > 1 else {}
        text = json.dumps({"format": _MAGIC.decode(), **cut, **self.to_json()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> "PackedForm":
        sizes = form["layout"]
        layout = Layout(**{**sizes, "shape": ModelShape(**sizes["shape"])})
        return cls(layout, form["dtype"], form["base_revision"])


@dataclass(frozen=True)
class PackedHeader:
    """What a packed file says of itself.

    num_slabs: of one shard.   scales: (layer, projection, scale), float32 values.
    checksums: by shard, sha256 of its slabs, hex.
    invocation_tokens: where an activated LoRA begins to apply; None for an ordinary one.
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

    @property
    def slabs_bytes(self) -> int:
        """Bytes of all shards' slabs together."""
        return len(self.checksums) * self.num_slabs * self.slab_bytes

    def to_bytes(self) -> bytes:
        """The first bytes of the file; as many for some checksums as for others."""
        tiles = [(t.layer, t.projection, t.index, t.slab, t.offset_bytes) for t in self.tiles]
        text = json.dumps({**vars(self), "tiles": tiles}, separators=(",", ":")).encode()
        prefix = _MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest()
        return prefix + text + bytes(_padding(len(text)))


def read_header(file: BinaryIO) -> PackedHeader:
    """The header of a packed file, checked; `file` is left at the first byte of the slabs.

    Raises AdapterError("lost") for anything that is not a whole file of this format.
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
    """Bytes of the slabs in a packed file, of all shards; 0 if it has no header.

    Raises FileNotFoundError.
    """
    with path.open("rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        length = int.from_bytes(prefix[len(_MAGIC) :][:8], "little")
        slabs_start = _PREFIX_BYTES + length + _padding(length)
        return max(0, file.seek(0, os.SEEK_END) - slabs_start)


def check_header(header: PackedHeader, digest: str, form: PackedForm) -> None:
    """Raises AdapterError("lost") unless this is `digest`, packed for this arena."""
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
