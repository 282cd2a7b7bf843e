"""The base model for the registry: its config, its projections' shapes, and its revision."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from registry.base.base_tensor import BaseTensor, TensorPlace, digest_of
from registry.base.text_config import text_config
from registry.errors import InvalidAdapter
from registry.formats.architecture import (
    EXPERT_ARCHITECTURES,
    FUSED_ARCHITECTURES,
    refusal,
    served_architecture,
    text_name,
)
from registry.formats.peft_format import EMBEDDING, HEAD, Header, read_header, read_tensor_chunks
from registry.strict_json import parse_object
from registry.whole_files import write_whole

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
_EMBEDDING, _HEAD = f"{EMBEDDING}.weight", f"{HEAD}.weight"
_SERVED = re.compile(
    r"(model\.layers\.\d+\."
    r"(?:self_attn\.(?:[qkvo]|qkv)_proj|mlp\.(?:gate|up|gate_up|down)_proj))"
    r"\.(weight|weight_packed|qweight)"
)
_OF_EXPERT = re.compile(r".*\.experts\.\d+\..*")


class UnsupportedBaseModel(Exception):
    """The folder given as base model cannot be served. reason: a clause for the message."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path} cannot be served as a base model: {reason}.")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A folder of a served architecture in Hugging Face format, or the text model in it.

    config: the content of config.json, or the text model's part (registry.base.text_config).
    base_revision: sha256 of config and weights, hex. It is that of what is served: towers for
    images are no part of it, nor are the names that a text model's tensors have beside towers.
    modules: (in_features, out_features) of every projection that an adapter may change, read from
    the weights, by name such as "model.layers.0.self_attn.q_proj".   ends: the same of the
    embedding and the head.
    tensors: all other tensors, such as "lm_head.weight", by name; adapters may hold copies of them.
    Those of experts are left out, since there are many thousands.
    served_as: the chat template and the precision in which it is served, as the gateway says.
    places: of the tensors of the embedding and the head, by name.
    created_at_s: Unix seconds at which config.json was written on this machine.
    """

    model_id: str
    path: Path
    config: dict[str, Any]
    modules: dict[str, tuple[int, int]]
    base_revision: str
    created_at_s: int = 0
    tensors: dict[str, BaseTensor] = field(default_factory=dict)
    served_as: str = ""
    places: dict[str, TensorPlace] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """sha256 of all that the answers depend on, hex: the revision, and how it is served."""
        return hashlib.sha256(f"{self.base_revision}\n{self.served_as}".encode()).hexdigest()

    @property
    def known_as(self) -> frozenset[str]:
        """Names, in lower case, by which an adapter's config may call the model: those of the model
        and of its folder, without the folders or the organization before them.
        """
        names = (self.model_id, self.model_id.rpartition("/")[2], self.path.name)
        return frozenset(name.lower() for name in names)

    @property
    def ends(self) -> dict[str, tuple[int, int]]:
        embedding = self.tensors.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            return {}
        vocab_size, hidden_size = embedding.shape
        return {EMBEDDING: (vocab_size, hidden_size), HEAD: (hidden_size, vocab_size)}

    @property
    def all_modules(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of all modules that an adapter may change."""
        return {**self.modules, **self.ends}

    @classmethod
    def load(cls, path: Path | str, model_id: str, cache_dir: Path | str) -> "BaseModel":
        """Load the model in the folder `path`. Raises UnsupportedBaseModel.

        The first load hashes all weights. The hashes are cached in `cache_dir` under the path and
        the names, sizes and times of the files.
        """
        path = Path(path).resolve()
        config, headers, modules = read_headers(path)
        hashes = _cached_hashes(path, config, headers, Path(cache_dir))
        tensors, places = hashes.tensors, _places_of_ends(path, headers)
        if config.get("tie_word_embeddings") and _EMBEDDING in tensors:
            # The head is the embedding, whatever else the files have.
            tensors[_HEAD], places[_HEAD] = tensors[_EMBEDDING], places[_EMBEDDING]
        created_at_s = int((path / _CONFIG).stat().st_mtime)
        return cls(
            model_id,
            path,
            config,
            modules,
            hashes.revision,
            created_at_s,
            tensors,
            places=places,
        )


def read_headers(
    path: Path,
) -> tuple[dict[str, Any], dict[str, Header], dict[str, tuple[int, int]]]:
    """Config, headers of the weight files and served modules of the folder, without the weights.

    Of a checkpoint that also takes images, they are those of its text model, under the names that
    it has alone. Raises UnsupportedBaseModel.
    """
    try:
        config = _read_config(path)
        headers = {name: _read_weights_header(path / name) for name in _weight_files(path)}
    except InvalidAdapter as error:
        raise UnsupportedBaseModel(path, str(error).rstrip(".")) from error
    headers = _text_headers(path, headers)
    config = text_config(config, {name for header in headers.values() for name in header.tensors})
    return config, headers, _served_modules(path, config, headers)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = (path / _CONFIG).read_bytes()
        config = parse_object(raw, param=_CONFIG, max_depth=_MAX_CONFIG_DEPTH)
    except OSError:
        raise UnsupportedBaseModel(path, f"it has no readable {_CONFIG}") from None
    if served_architecture(text_config(config)) is None:
        raise UnsupportedBaseModel(path, refusal(config))
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
                path, f"{_INDEX} names {ascii(missing)}, which are not in the folder"
            )
        return names
    pickles = sorted(file.name for file in path.glob("*.bin"))
    reason = f"it has neither {_WEIGHTS} nor {_INDEX}"
    if pickles:
        reason += f"; {pickles[0]} is a pickle, convert it with save_pretrained(...)"
    raise UnsupportedBaseModel(path, reason)


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


def _text_headers(path: Path, headers: dict[str, Header]) -> dict[str, Header]:
    """The headers without tensors of towers. Raises UnsupportedBaseModel if two have one name."""
    places: dict[str, str] = {}
    found = {}
    for filename, header in headers.items():
        tensors = {}
        for stored, tensor in header.tensors.items():
            if (name := text_name(stored)) is None:
                continue
            if other := places.get(name):
                both = f"{ascii(other)} and {ascii(stored)}"
                raise UnsupportedBaseModel(path, f"{both} are the same tensor twice")
            places[name], tensors[name] = stored, tensor
        found[filename] = replace(header, tensors=tensors)
    return found


def _places_of_ends(path: Path, headers: dict[str, Header]) -> dict[str, TensorPlace]:
    return {
        name: TensorPlace(path / filename, tensor.start)
        for filename, header in headers.items()
        for name, tensor in header.tensors.items()
        if name in (_EMBEDDING, _HEAD)
    }


def _served_modules(
    path: Path, config: dict[str, Any], headers: dict[str, Header]
) -> dict[str, tuple[int, int]]:
    modules = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            match = _SERVED.fullmatch(name)
            if match and len(tensor.shape) == 2:
                modules[match[1]] = _features(match[2], tensor.shape, config)
    names = list(_expected_modules(path, config))
    missing = [name for name in names if name not in modules]
    if missing:
        raise UnsupportedBaseModel(path, f"its weights have no {missing[0]}")
    return {name: modules[name] for name in names}


def _features(kind: str, shape: tuple[int, ...], config: dict[str, Any]) -> tuple[int, int]:
    """(in_features, out_features) of a weight, or of its codes in words of 32 bits."""
    rows, columns = shape
    if kind == "weight":
        return columns, rows
    quantization = config.get("quantization_config") or {}
    if kind == "weight_packed":
        groups = (quantization.get("config_groups") or {}).values()
        bits = [(group.get("weights") or {}).get("num_bits") for group in groups]
        return columns * 32 // (bits[0] if bits and bits[0] else 4), rows
    if quantization.get("quant_method") == "awq":
        return rows, columns * 8
    return rows * 32 // (quantization.get("bits") or 4), columns


def _expected_modules(path: Path, config: dict[str, Any]) -> Iterator[str]:
    num_layers = config.get("num_hidden_layers")
    if type(num_layers) is not int or num_layers < 1:
        raise UnsupportedBaseModel(path, f"{_CONFIG} has no num_hidden_layers")
    architecture = served_architecture(config)
    is_fused = architecture in FUSED_ARCHITECTURES
    of_attention = _FUSED_ATTENTION_PROJECTIONS if is_fused else ATTENTION_PROJECTIONS
    of_mlp: tuple[str, ...] = _FUSED_MLP_PROJECTIONS if is_fused else MLP_PROJECTIONS
    if architecture in EXPERT_ARCHITECTURES:
        of_mlp = ()
    for layer in range(num_layers):
        for projection in of_attention:
            yield f"model.layers.{layer}.self_attn.{projection}"
        for projection in of_mlp:
            yield f"model.layers.{layer}.mlp.{projection}"


@dataclass(frozen=True, slots=True)
class _Hashes:
    """Hashes of a model.   tensors: those outside the projections, by name."""

    revision: str
    tensors: dict[str, BaseTensor]

    @classmethod
    def from_json(cls, text: str) -> "_Hashes":
        """Read the JSON of the fields. Raises an error of a lookup or a value if it is damaged."""
        found = json.loads(text)
        if not re.fullmatch("[0-9a-f]{64}", found["revision"]):
            raise ValueError("no revision")
        tensors = {
            name: BaseTensor(it["dtype"], tuple(it["shape"]), it["digest"])
            for name, it in found["tensors"].items()
        }
        return cls(found["revision"], tensors)


def _cached_hashes(
    path: Path, config: dict[str, Any], headers: dict[str, Header], cache_dir: Path
) -> _Hashes:
    # The path is part of the key, since copies of two models can share names, sizes and times.
    key = hashlib.sha256(json.dumps(_fingerprint(path, headers)).encode()).hexdigest()
    cache = cache_dir / f"base-hashes-{key[:32]}.json"
    try:
        return _Hashes.from_json(cache.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    hashes = _hash_model(path, config, headers)
    cache_dir.mkdir(parents=True, exist_ok=True)
    write_whole(cache, json.dumps(asdict(hashes)).encode())
    return hashes


def _fingerprint(path: Path, headers: dict[str, Header]) -> list[object]:
    stats = {name: (path / name).stat() for name in (_CONFIG, *headers)}
    return [str(path), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]]


def _hash_model(path: Path, config: dict[str, Any], headers: dict[str, Header]) -> _Hashes:
    """The revision: sha256 over the canonical config and, in order of names, each tensor's name and
    digest; and those tensors that are no projections.

    The same model has the same revision however its weights are cut into files.
    """
    tensors: dict[str, BaseTensor] = {}
    for filename, header in headers.items():
        with (path / filename).open("rb") as file:
            for name, info in header.tensors.items():
                digest = digest_of(info.dtype, info.shape, read_tensor_chunks(file, info))
                tensors[name] = BaseTensor(info.dtype, tuple(info.shape), digest)
    total = hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\n{name} {tensor.digest}".encode())
    others = {
        name: tensor
        for name, tensor in tensors.items()
        if not _SERVED.fullmatch(name) and not _OF_EXPERT.fullmatch(name)
    }
    return _Hashes(total.hexdigest(), others)
