"""The base model for the registry: its config, its projections' shapes, and its revision."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from registry.architecture import FUSED_ARCHITECTURES, refusal, served_architecture
from registry.errors import InvalidAdapter, UnsupportedBaseModel
from registry.peft_format import Header, read_header, read_tensor_chunks
from registry.strict_json import parse_object

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_FUSED_ATTENTION_PROJECTIONS = ("qkv_proj", "o_proj")
_FUSED_MLP_PROJECTIONS = ("gate_up_proj", "down_proj")

# safetensors' own limit; a base model of 100 layers needs about 100 kB.
MAX_HEADER_BYTES = 100_000_000

_CONFIG = "config.json"
_MAX_CONFIG_DEPTH = 32
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SERVED = re.compile(
    r"(model\.layers\.\d+\.(?:self_attn\.(?:[qkvo]|qkv)_proj|mlp\.(?:gate|up|gate_up|down)_proj))\.weight"
)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A folder of a served architecture in Hugging Face format.

    config: the content of config.json.   base_revision: sha256 of config and weights, hex.
    modules: (in_features, out_features) of every projection that an adapter may change, read from
    the weights, by name such as "model.layers.0.self_attn.q_proj".
    created_at_s: Unix seconds at which config.json was written on this machine.
    """

    model_id: str
    path: Path
    config: dict[str, Any]
    modules: dict[str, tuple[int, int]]
    base_revision: str
    created_at_s: int = 0

    @classmethod
    def load(cls, path: Path | str, model_id: str, cache_dir: Path | str) -> "BaseModel":
        """Load the model in the folder `path`. Raises UnsupportedBaseModel.

        The first load hashes all weights. The revision is cached in `cache_dir` under the path and
        the names, sizes and times of the files.
        """
        path = Path(path).resolve()
        try:
            config = _read_config(path)
            files = _weight_files(path)
            headers = {name: _read_weights_header(path / name) for name in files}
        except InvalidAdapter as error:
            raise UnsupportedBaseModel(path=path, reason=str(error).rstrip(".")) from error
        modules = _served_modules(path, config, headers)
        revision = _cached_revision(path, config, headers, Path(cache_dir))
        created_at_s = int((path / _CONFIG).stat().st_mtime)
        return cls(model_id, path, config, modules, revision, created_at_s)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = (path / _CONFIG).read_bytes()
        config = parse_object(raw, param=_CONFIG, max_depth=_MAX_CONFIG_DEPTH)
    except OSError:
        raise UnsupportedBaseModel(path=path, reason=f"it has no readable {_CONFIG}") from None
    if served_architecture(config) is None:
        raise UnsupportedBaseModel(path=path, reason=refusal(config))
    return config


def _weight_files(path: Path) -> list[str]:
    """Names of the safetensors files that hold the model, sorted."""
    if (path / _WEIGHTS).is_file():
        return [_WEIGHTS]
    if (path / _INDEX).is_file():
        index = parse_object((path / _INDEX).read_bytes(), param=_INDEX).get("weight_map")
        names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
        missing = [name for name in names if Path(name).name != name or not (path / name).is_file()]
        if missing or not names:
            raise UnsupportedBaseModel(
                path=path, reason=f"{_INDEX} names {ascii(missing)}, which are not in the folder"
            )
        return names
    pickles = sorted(file.name for file in path.glob("*.bin"))
    reason = f"it has neither {_WEIGHTS} nor {_INDEX}"
    if pickles:
        reason += f"; {pickles[0]} is a pickle, convert it with save_pretrained(...)"
    raise UnsupportedBaseModel(path=path, reason=reason)


def _read_weights_header(file_path: Path) -> Header:
    with file_path.open("rb") as file:
        return read_header(
            file,
            file_path.stat().st_size,
            max_header_bytes=MAX_HEADER_BYTES,
            max_metadata_bytes=MAX_HEADER_BYTES,
            max_tensors=1_000_000,
            filename=file_path.name,
        )


def _served_modules(
    path: Path, config: dict[str, Any], headers: dict[str, Header]
) -> dict[str, tuple[int, int]]:
    modules = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            match = _SERVED.fullmatch(name)
            if match and len(tensor.shape) == 2:
                out_features, in_features = tensor.shape
                modules[match[1]] = (in_features, out_features)
    names = list(_expected_modules(path, config))
    missing = [name for name in names if name not in modules]
    if missing:
        raise UnsupportedBaseModel(path=path, reason=f"its weights have no {missing[0]}")
    return {name: modules[name] for name in names}


def _expected_modules(path: Path, config: dict[str, Any]) -> Iterator[str]:
    num_layers = config.get("num_hidden_layers")
    if type(num_layers) is not int or num_layers < 1:
        raise UnsupportedBaseModel(path=path, reason=f"{_CONFIG} has no num_hidden_layers")
    is_fused = served_architecture(config) in FUSED_ARCHITECTURES
    of_attention = _FUSED_ATTENTION_PROJECTIONS if is_fused else ATTENTION_PROJECTIONS
    of_mlp = _FUSED_MLP_PROJECTIONS if is_fused else MLP_PROJECTIONS
    for layer in range(num_layers):
        for projection in of_attention:
            yield f"model.layers.{layer}.self_attn.{projection}"
        for projection in of_mlp:
            yield f"model.layers.{layer}.mlp.{projection}"


def _cached_revision(
    path: Path, config: dict[str, Any], headers: dict[str, Header], cache_dir: Path
) -> str:
    # The path is part of the key, since copies of two models can share names, sizes and times.
    key = hashlib.sha256(json.dumps(_fingerprint(path, headers)).encode()).hexdigest()
    cache = cache_dir / f"base-revision-{key[:32]}"
    try:
        cached = cache.read_text()
        if re.fullmatch("[0-9a-f]{64}", cached):
            return cached
    except (OSError, UnicodeDecodeError):
        pass
    revision = _hash_model(path, config, headers)
    _write_whole(cache, revision)
    return revision


def _fingerprint(path: Path, headers: dict[str, Header]) -> list[object]:
    stats = {name: (path / name).stat() for name in (_CONFIG, *headers)}
    return [str(path), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]]


def _hash_model(path: Path, config: dict[str, Any], headers: dict[str, Header]) -> str:
    """sha256 over the canonical config and, in order of names, each tensor's name and sha256.

    The same model has the same revision however its weights are cut into files.
    """
    digests: dict[str, str] = {}
    for filename, header in headers.items():
        with (path / filename).open("rb") as file:
            digests |= _hash_tensors(file, header)
    total = hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    for name, digest in sorted(digests.items()):
        total.update(f"\n{name} {digest}".encode())
    return total.hexdigest()


def _hash_tensors(file: BinaryIO, header: Header) -> dict[str, str]:
    digests = {}
    for name, tensor in header.tensors.items():
        # Equal bytes of a different dtype or shape are a different tensor.
        hasher = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        for chunk in read_tensor_chunks(file, tensor):
            hasher.update(chunk)
        digests[name] = hasher.hexdigest()
    return digests


def _write_whole(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, target)
