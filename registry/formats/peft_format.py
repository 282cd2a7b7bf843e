"""The two safetensors forms of an adapter: PEFT's file, and the canonical object that is stored.

The canonical object is one safetensors file with PEFT's tensor names in sorted order, in the
uploaded dtype. Its header has the effective rank and scale of every module, and the invocation
tokens of an activated LoRA. Its sha256 is the adapter's digest.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import isfinite, prod
from pathlib import Path
from typing import Any, BinaryIO

from registry.errors import InvalidAdapter, shown
from registry.strict_json import parse_object

WEIGHTS_FILE = "adapter_model.safetensors"
CANONICAL_FORMAT = "chorale.adapter.v1"

# Adapters on the experts of a large mixture (94 layers of 128) have 72,192 tensors; they are read
# so that the error names one.
MAX_UPLOAD_HEADER_BYTES = 16 << 20
MAX_METADATA_BYTES = 64 << 10
# The canonical header has a second entry for each module, so it may be larger than the upload's.
MAX_CANONICAL_HEADER_BYTES = 4 << 20
MAX_TENSORS = 100_000
CHUNK_BYTES = 1 << 20

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

ADAPTER_DTYPES = frozenset({"F16", "BF16", "F32"})

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
"""Modules of a model's ends, by the names that all served families give them."""

MAX_ADDED_TOKENS = 64
"""Most tokens that an adapter may add to the base model's vocabulary: as few that their tiles fit
into the slabs of every model (lora.layout)."""

_PEFT_NAME = re.compile(
    r"base_model\.model\.([A-Za-z0-9_.]+)\.(?:lora_(A|B)\.weight|lora_embedding_(A|B))"
)
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place of a tensor. start, end: bytes from the beginning of the file, not of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MadeTensor(TensorInfo):
    """A tensor that was computed and is in no file. start: 0.

    make: gives its bytes anew, in pieces of whole values that are seldom larger than CHUNK_BYTES.
    It may read the uploaded file.
    """

    make: Callable[[BinaryIO], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class Header:
    """A checked safetensors header. tensors: by name, in the order of their bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModuleScale:
    """Rank and scale of a module's update, scale * B @ A with `rank` rows of A. scale: float32."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class CanonicalAdapter:
    """An adapter as its canonical object has it, before it is written and after it is read.

    modules: by module name, such as "model.layers.0.self_attn.q_proj".
    tensors: by PEFT's name, see `lora_names`; A is [rank, in], B is [out, rank].
    invocation_tokens: an activated LoRA applies from their last occurrence in the prompt on; None
    for an ordinary LoRA.   vocab_size: number of token ids, if the adapter adds some to the base
    model's; its tensors of the embedding and the head then have as many columns and rows.
    """

    modules: dict[str, ModuleScale]
    tensors: dict[str, TensorInfo]
    invocation_tokens: tuple[int, ...] | None = None
    vocab_size: int | None = None

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules.values())


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Digest and size of a written object or file. digest: sha256 of the whole of it, hex."""

    digest: str
    size_bytes: int


def file_fault(code: str, message: str, filename: str = WEIGHTS_FILE) -> InvalidAdapter:
    """The fault of an uploaded file.   message: a sentence without its period."""
    return InvalidAdapter(code=code, message=f"{message}.", param=filename)


def lora_names(module: str) -> tuple[str, str]:
    """PEFT's names of the A and the B tensor of a module."""
    prefix = f"base_model.model.{module}"
    if module == EMBEDDING:
        return f"{prefix}.lora_embedding_A", f"{prefix}.lora_embedding_B"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


def split_lora_name(name: str) -> tuple[str, str] | None:
    """Module and "A" or "B" of a PEFT tensor name; None for any other name."""
    match = _PEFT_NAME.fullmatch(name)
    if match is None or (match[1] == EMBEDDING) != bool(match[3]):
        return None
    return match[1], match[2] or match[3]


def read_header(
    file: BinaryIO,
    file_size: int,
    *,
    max_header_bytes: int = MAX_UPLOAD_HEADER_BYTES,
    max_metadata_bytes: int = MAX_METADATA_BYTES,
    max_tensors: int = MAX_TENSORS,
    filename: str = WEIGHTS_FILE,
) -> Header:
    """Read and check the header of a safetensors file, and nothing beyond the header.

    Raises InvalidAdapter: pickle_refused, truncated_file, header_too_large, invalid_header,
    invalid_json, duplicate_key, metadata_too_large, too_many_tensors, unsupported_dtype,
    bad_offsets. The rules are those of the safetensors README, section Format.
    """

    prefix = file.read(8)
    header_bytes = int.from_bytes(prefix, "little")
    # A header length whose low byte is 0x80 looks like a pickle too; then byte 8 decides.
    if prefix[:1] == b"\x80" or prefix[:2] == b"PK":
        if file.read(1) != b"{":
            message = f"{filename} is a pickle or a zip archive; save the adapter as safetensors"
            raise file_fault("pickle_refused", message, filename)
        file.seek(-1, os.SEEK_CUR)
    if len(prefix) == 8 and header_bytes > max_header_bytes:
        message = f"{filename} claims a header of {header_bytes} bytes; the limit is "
        raise file_fault("header_too_large", f"{message}{max_header_bytes}", filename)
    if 8 + header_bytes > file_size:
        message = f"{filename} ends inside its header; send the whole file"
        raise file_fault("truncated_file", message, filename)
    raw = file.read(header_bytes)
    if not raw.startswith(b"{"):
        message = f"{filename} is not a safetensors file: no JSON header"
        raise file_fault("invalid_header", message, filename)
    entries = parse_object(raw, param=filename)
    metadata = _read_metadata(entries.pop("__metadata__", {}), max_metadata_bytes, filename)
    if len(entries) > max_tensors:
        message = f"{filename} has {len(entries)} tensors; the limit is {max_tensors}"
        raise file_fault("too_many_tensors", message, filename)
    data_start = 8 + header_bytes
    tensors = {name: _read_entry(name, e, data_start, filename) for name, e in entries.items()}
    return Header(_in_byte_order(tensors, data_start, file_size, filename), metadata)


def open_canonical(path: Path | str) -> CanonicalAdapter:
    """Read the canonical object at `path`: check its header, and pair its tensors with its modules.

    The bytes of the tensors are not read, since the fetcher has compared the object's digest.
    Raises InvalidAdapter.
    """
    path = Path(path)
    with path.open("rb") as file:
        return read_canonical(file, path.stat().st_size)


def read_canonical(file: BinaryIO, file_size: int) -> CanonicalAdapter:
    """Do the work of open_canonical for a file that is open at its beginning."""
    header = read_header(
        file,
        file_size,
        max_header_bytes=MAX_CANONICAL_HEADER_BYTES,
        max_metadata_bytes=MAX_CANONICAL_HEADER_BYTES,
        filename="canonical object",
    )
    adapter = _described(header)
    expected = sorted(name for module in adapter.modules for name in lora_names(module))
    if list(header.tensors) != expected:
        raise _not_canonical("its tensors are not its modules' pairs in sorted order")
    for module, effect in adapter.modules.items():
        a, b = (header.tensors[name] for name in lora_names(module))
        if {a.dtype, b.dtype} - ADAPTER_DTYPES:
            raise _not_canonical(f"{module} is not of a floating dtype that is served")
        if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == effect.rank:
            raise _not_canonical(f"the shapes of {module} do not have its rank")
    return adapter


def canonical_header(adapter: CanonicalAdapter) -> bytes:
    """The first bytes of the canonical object: length and header, padded to 8-align the data."""
    effects = {name: {"rank": m.rank, "scale": m.scale} for name, m in adapter.modules.items()}
    config: dict[str, Any] = {"modules": effects}
    # An added key would change digests of ordinary adapters.
    if adapter.invocation_tokens is not None:
        config["invocation_tokens"] = list(adapter.invocation_tokens)
    if adapter.vocab_size is not None:
        config["vocab_size"] = adapter.vocab_size
    entries: dict[str, Any] = {
        "__metadata__": {"format": CANONICAL_FORMAT, "config": _compact_json(config)}
    }
    position = 0
    for name, tensor in sorted(adapter.tensors.items()):
        end = position + tensor.size_bytes
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = _compact_json(entries).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def write_canonical(
    destination: BinaryIO, weights: BinaryIO, adapter: CanonicalAdapter
) -> ObjectInfo:
    """Write the canonical object of an adapter that has passed its checks.

    weights: the uploaded file, in which its tensors are. At most CHUNK_BYTES are held at a time.
    """
    chunks = (read_tensor_chunks(weights, it) for _, it in sorted(adapter.tensors.items()))
    header = canonical_header(adapter)
    return write_hashed(destination, chain((header,), chain.from_iterable(chunks)))


def write_hashed(destination: BinaryIO, chunks: Iterable[bytes]) -> ObjectInfo:
    """Write bytes to a file that is open, one piece after the other."""
    hasher = hashlib.sha256()
    size_bytes = 0
    for chunk in chunks:
        hasher.update(chunk)
        destination.write(chunk)
        size_bytes += len(chunk)
    return ObjectInfo(hasher.hexdigest(), size_bytes)


def read_tensor_chunks(file: BinaryIO, tensor: TensorInfo) -> Iterator[bytes]:
    """The bytes of one tensor, in pieces of at most CHUNK_BYTES."""
    if isinstance(tensor, MadeTensor):
        yield from tensor.make(file)
        return
    file.seek(tensor.start)
    left = tensor.size_bytes
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        assert chunk, "the header was checked against the size of the file"
        left -= len(chunk)
        yield chunk


def _compact_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read_metadata(value: object, max_bytes: int, filename: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        message = f"__metadata__ of {filename} must map strings to strings"
        raise file_fault("invalid_header", message, filename)
    size_bytes = sum(len(text.encode(errors="replace")) for item in value.items() for text in item)
    if size_bytes > max_bytes:
        message = f"__metadata__ of {filename} has {size_bytes} bytes; the limit is {max_bytes}"
        raise file_fault("metadata_too_large", message, filename)
    return value


def _read_entry(name: str, entry: object, data_start: int, filename: str) -> TensorInfo:
    def fault(code: str, message: str) -> InvalidAdapter:
        return file_fault(code, f"Tensor {shown(name)} of {filename} {message}", filename)

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fault("invalid_header", "must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fault("unsupported_dtype", f"has the dtype {shown(str(dtype))}, which is not known")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise fault("invalid_header", "has a shape that is not a short list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault("bad_offsets", "has data_offsets that are not [begin, end]")
    if offsets[1] - offsets[0] != prod(shape) * DTYPE_BYTES[dtype]:
        raise fault("bad_offsets", "has data_offsets that do not fit its shape and dtype")
    return TensorInfo(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(value: object) -> bool:
    # bool is an int in Python; 2**63 keeps products of hostile shapes small enough to compute.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _in_byte_order(
    tensors: dict[str, TensorInfo], data_start: int, file_size: int, filename: str
) -> dict[str, TensorInfo]:
    """The tensors sorted by offset. Raises on a hole, an overlap, or bytes missing or left over."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    position = data_start
    for name, tensor in ordered.items():
        if tensor.start != position:
            kind = "a hole" if tensor.start > position else "an overlap"
            message = f"{filename} has {kind} before tensor {shown(name)}; save it again"
            raise file_fault("bad_offsets", message, filename)
        position = tensor.end
    if position > file_size:
        message = f"{filename} has {file_size} bytes, its header describes {position}; "
        raise file_fault("truncated_file", f"{message}send the whole file", filename)
    if position < file_size:
        message = f"{filename} has {file_size - position} bytes after its last tensor; "
        raise file_fault("bad_offsets", f"{message}save it again", filename)
    return ordered


def _described(header: Header) -> CanonicalAdapter:
    """The adapter that the header's metadata describes."""
    metadata = header.metadata
    if metadata.get("format") != CANONICAL_FORMAT:
        raise _not_canonical(f"its format is not {CANONICAL_FORMAT}")
    config = parse_object(metadata.get("config", "").encode(), param="canonical object")
    entries = config.get("modules")
    if not isinstance(entries, dict) or not entries:
        raise _not_canonical("it lists no modules")
    modules = {}
    for name, entry in entries.items():
        rank, scale = (
            (entry.get("rank"), entry.get("scale")) if isinstance(entry, dict) else (None, None)
        )
        if type(rank) is not int or rank < 1 or type(scale) is not float or not isfinite(scale):
            raise _not_canonical(f"{shown(name)} has no valid rank and scale")
        modules[name] = ModuleScale(rank, scale)
    tokens, vocab_size = config.get("invocation_tokens"), config.get("vocab_size")
    if tokens is not None and not (tokens and _are_sizes(tokens)):
        raise _not_canonical("its invocation tokens are no token ids")
    if vocab_size is not None and not _are_sizes([vocab_size]):
        raise _not_canonical("its vocab_size is no number of tokens")
    tokens = None if tokens is None else tuple(tokens)
    return CanonicalAdapter(modules, header.tensors, tokens, vocab_size)


def _not_canonical(reason: str) -> InvalidAdapter:
    return InvalidAdapter(
        code="not_canonical",
        message=f"The canonical object is damaged: {reason}; upload the adapter again.",
    )
