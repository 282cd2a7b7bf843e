"""Shards of an adapter's weights, joined into the one file that is sent."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from registry.errors import shown
from registry.formats.peft_format import MAX_TENSORS, TensorInfo, read_header, read_tensor_chunks
from registry.strict_json import parse_object
from server.cli.adapter_folder import NotSendable

_MAX_INDEX_BYTES = 8 << 20


def join(shards: Sequence[Path], index: Path | None, out: Path) -> None:
    """Write the tensors of all shards to one file, piece by piece.   shards: sorted by name.

    index: says for each tensor in which shard it is, which has to be true.
    Raises NotSendable, InvalidAdapter, which name the file at fault; OSError.
    """
    _check_numbers([path.name for path in shards])
    tensors: dict[str, tuple[TensorInfo, Iterable[bytes]]] = {}
    places: dict[str, str] = {}
    for path in shards:
        with path.open("rb") as file:
            found = read_header(file, path.stat().st_size, filename=path.name).tensors
        if not found:
            raise NotSendable(f"{path.name} has no tensors; save the adapter again.")
        for name, info in found.items():
            if name in places:
                raise NotSendable(f"{path.name} and {places[name]} both have {shown(name)}.")
            places[name], tensors[name] = path.name, (info, _chunks(path, info))
        if len(tensors) > MAX_TENSORS:
            raise NotSendable(f"{path.name} makes more than {MAX_TENSORS} tensors, the limit.")
    if index is not None:
        _check_index(index, places)
    write_weights(out, tensors)


def write_weights(path: Path, tensors: Mapping[str, tuple[TensorInfo, Iterable[bytes]]]) -> None:
    """Write a safetensors file of tensors with their bytes, which are read one after the other.

    Of the infos, dtype, shape and size count; the place does not.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (info, _) in tensors.items():
        offsets = [position, position + info.size_bytes]
        entries[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": offsets}
        position += info.size_bytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, chunks in tensors.values():
            file.writelines(chunks)


def _chunks(path: Path, info: TensorInfo) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from read_tensor_chunks(file, info)


def _check_numbers(names: Sequence[str]) -> None:
    """Check that the shards are 1 to N of N. Raises NotSendable."""
    total = names[-1][-17:-12]
    for number, name in enumerate(names, 1):
        if name != (wanted := f"adapter_model-{number:05}-of-{total}.safetensors"):
            raise NotSendable(f"{name} is there, and {wanted} is not; send the shards of one save.")
    if len(names) != int(total):
        raise NotSendable(f"{names[-1]} is the last of {len(names)} shards; send all of them.")


def _check_index(path: Path, places: Mapping[str, str]) -> None:
    """Check that the index names the shard of each tensor. Raises NotSendable, InvalidAdapter."""
    with path.open("rb") as file:
        raw = file.read(_MAX_INDEX_BYTES + 1)
    if len(raw) > _MAX_INDEX_BYTES:
        raise NotSendable(f"{path.name} is larger than {_MAX_INDEX_BYTES} bytes.")
    said = parse_object(raw, param=path.name).get("weight_map")
    if not isinstance(said, dict):
        raise NotSendable(f"{path.name} has no weight_map.")
    for name in [*places, *said]:
        if said.get(name) != places.get(name):
            where = shown(str(said.get(name, "no file")))
            found = places.get(name, "no shard of this folder")
            raise NotSendable(f"{path.name} has {shown(name)} in {where}, and it is in {found}.")
