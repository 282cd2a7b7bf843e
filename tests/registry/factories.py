"""Small base models, adapters and damaged files, made without torch and safetensors."""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from registry.base.base_model import BaseModel
from registry.checks.base_choice import choose_base
from registry.checks.passport import Passport
from registry.checks.validate import AdapterLimits, check_adapter
from registry.checks.validator import ValidatedAdapter
from registry.errors import ObjectNotFound
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import (
    WEIGHTS_FILE,
    CanonicalAdapter,
    lora_names,
    read_canonical,
    write_canonical,
)
from registry.storage.storage import LocalStorage, Storage
from registry.uploads.rows import UploadFile


def parse_canonical(data: bytes) -> CanonicalAdapter:
    """Parse a canonical object in memory: data[tensor.start : tensor.end] is a tensor."""
    return read_canonical(io.BytesIO(data), len(data))


def validate_adapter(
    config: bytes, weights: Path | BinaryIO, base: BaseModel, limits: AdapterLimits
) -> Passport:
    """The passport of an adapter that passes the checks."""
    file = io.BytesIO(weights.read_bytes()) if isinstance(weights, Path) else weights
    return check_adapter(config, file, base, limits).passport


class Clock:
    """A clock that moves only when the test sets it."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


Tensor = tuple[str, tuple[int, ...], bytes]

HIDDEN, KV, INTERMEDIATE = 16, 8, 24
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}


def encode_header(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this header, which may be invalid."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def encode(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A valid safetensors file with the tensors in this order."""
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    position, data = 0, []
    for name, (dtype, shape, raw) in tensors.items():
        end = position + len(raw)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
        data.append(raw)
    return encode_header(header, b"".join(data))


def make_tensor(values: np.ndarray, dtype: str = "F32") -> Tensor:
    """Encode values as a safetensors tensor; BF16 is float32 cut to its upper 16 bits."""
    if dtype == "BF16":
        bits = values.astype("<f4").view("<u4") >> 16
        return dtype, values.shape, bits.astype("<u2").tobytes()
    kind = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
    return dtype, values.shape, values.astype(kind).tobytes()


def make_base(
    folder: Path, model_id: str = "tiny-llama", *, num_layers: int = 2, seed: int = 0
) -> BaseModel:
    """Write a folder with a Llama model of random weights, and load it."""
    write_base(folder, num_layers=num_layers, seed=seed)
    return BaseModel.load(folder, model_id, folder.parent / "cache")


def write_base(folder: Path, *, num_layers: int = 2, seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": make_tensor(rng.normal(size=(7, HIDDEN)))}
    for layer in range(num_layers):
        for projection, (in_features, out_features) in WIDTHS.items():
            name = f"model.layers.{layer}.{projection}.weight"
            tensors[name] = make_tensor(rng.normal(size=(out_features, in_features)))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": num_layers,
        "vocab_size": 7,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(encode(tensors))
    return tensors


def make_config(**changes: object) -> bytes:
    """adapter_config.json for q_proj and v_proj at rank 4, alpha 8."""
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "init_lora_weights": True,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return json.dumps(config | changes).encode()


def make_adapter(
    base: BaseModel,
    *,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    rank: int = 4,
    dtype: str = "F32",
    seed: int = 1,
) -> dict[str, Tensor]:
    """Random A and B for every targeted module of the base."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (in_features, out_features) in base.modules.items():
        if module.rpartition(".")[2] in targets:
            a, b = lora_names(module)
            tensors[a] = make_tensor(rng.normal(size=(rank, in_features)), dtype)
            tensors[b] = make_tensor(rng.normal(size=(out_features, rank)), dtype)
    return tensors


def keys(storage: Storage, prefix: str = "") -> list[str]:
    """Keys of the objects in a store."""
    return [found.key for found in storage.list(prefix)]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_files(config: bytes, weights: bytes) -> dict[str, bytes]:
    return {CONFIG_FILE: config, WEIGHTS_FILE: weights}


def sound_files(base: BaseModel, **changes: Any) -> dict[str, bytes]:
    return make_files(make_config(), encode(make_adapter(base, **changes)))


def declare(files: dict[str, bytes]) -> dict[str, UploadFile]:
    return {name: UploadFile(name, len(data), sha256(data)) for name, data in files.items()}


class InProcessValidator:
    """Does a validator process's work in this process, which saves the 0.25 s of its start."""

    def check(
        self,
        bases: Sequence[BaseModel],
        config: Path,
        weights: Path,
        target: Path,
        tokenizer: Mapping[str, Path],
    ) -> ValidatedAdapter:
        limits = AdapterLimits()
        with weights.open("rb") as source, target.open("wb") as out:
            base = choose_base(bases, config.read_bytes(), source, limits)
            checked = check_adapter(config.read_bytes(), source, base, limits)
            written = write_canonical(out, source, checked.adapter)
        passport = asdict(checked.passport)
        return ValidatedAdapter(
            passport,
            written.digest,
            written.size_bytes,
            base.model_id,
            is_offline=True,
            # What the files say is all their own.
            tokenizer="".join(path.read_text() for path in tokenizer.values()) or None,
        )


class ActingStorage:
    """A store that calls `act` once, before or after its first call of the named method."""

    def __init__(
        self,
        storage: Storage,
        *,
        before: str | None = None,
        after: str | None = None,
        act: Callable[[], object],
    ) -> None:
        self._storage, self._before, self._after, self._act = storage, before, after, act

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if name not in (self._before, self._after):
            return method

        def acting(*arguments: Any) -> Any:
            act, self._act = self._act, lambda: None
            if name == self._before:
                act()
            answer = method(*arguments)
            if name == self._after:
                act()
            return answer

        return acting


class PresignedFolder(LocalStorage):
    """A folder that takes parts by URL, as a bucket does; `put_url` is the client's HTTP PUT."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._folder = root
        self.multiparts: dict[str, dict[int, bytes]] = {}

    def begin_multipart(self, key: str) -> str:
        multipart_id = f"{key}#{len(self.multiparts)}"
        self.multiparts[multipart_id] = {}
        return multipart_id

    def presign_part(
        self, key: str, multipart_id: str, number: int, size_bytes: int, expires_s: int
    ) -> str:
        return f"{multipart_id}?{number}&{size_bytes}"

    def put_url(self, url: str, data: bytes) -> None:
        multipart_id, _, rest = url.partition("?")
        number, size_bytes = map(int, rest.split("&"))
        assert len(data) == size_bytes, "403: another size was signed"
        self.multiparts[multipart_id][number] = data

    def list_parts(self, key: str, multipart_id: str) -> dict[int, int]:
        if multipart_id not in self.multiparts:
            raise ObjectNotFound(key=key)
        return {number: len(data) for number, data in self.multiparts[multipart_id].items()}

    def complete_multipart(self, key: str, multipart_id: str) -> None:
        self.list_parts(key, multipart_id)
        parts = self.multiparts.pop(multipart_id)
        whole = self._folder.parent / "whole"
        whole.write_bytes(b"".join(parts[number] for number in sorted(parts)))
        self.put(key, whole)
        whole.unlink()

    def abort_multipart(self, key: str, multipart_id: str) -> None:
        self.multiparts.pop(multipart_id, None)

    def abort_multiparts(self, prefix: str, begun_before: float) -> int:
        return 0
