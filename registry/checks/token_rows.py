"""Rows of the embedding and the head that training changed, served as an exact LoRA.

PEFT saves trained tokens as their new rows (`trainable_token_indices`), and a whole embedding or
head (`modules_to_save`, `save_embedding_layers`), of which most rows are often the base model's.
If n rows changed, the LoRA of rank n that turns the base model's rows into the new ones is

    embedding   A [n, vocab]    one in each row       B [hidden, n]   new - base
    head        A [n, hidden]   new - base            B [vocab, n]    one in each column

Rows come on top of a LoRA of the same module, and take its scale.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO

from registry.base.base_model import BaseModel
from registry.base.base_tensor import BaseTensor
from registry.errors import shown
from registry.formats.peft_config import CONFIG_FILE, PeftConfig
from registry.formats.peft_format import (
    ADAPTER_DTYPES,
    CHUNK_BYTES,
    DTYPE_BYTES,
    EMBEDDING,
    HEAD,
    MAX_ADDED_TOKENS,
    WEIGHTS_FILE,
    Header,
    MadeTensor,
    ModuleScale,
    TensorInfo,
    file_fault,
    lora_names,
    read_tensor_chunks,
)
from registry.formats.tensor_values import decode, round_to

# Functions import numpy when they are called, as in registry.formats.tensor_values.
if TYPE_CHECKING:
    import numpy as np

    Rows = dict[int, np.ndarray[Any, np.dtype[np.float32]]]
    """New minus old row by token id, [hidden] each."""

_ENDS = (EMBEDDING, HEAD)
END_WEIGHTS = {f"{module}.weight": module for module in _ENDS}
"""Modules of the ends by the names of their weights."""
TOKEN_TENSORS = {
    f"base_model.model.{module}.token_adapter.trainable_tokens_delta": module for module in _ENDS
}
"""Modules by the names of the new rows of their trained tokens."""
_UNUSED_COPY = ".original_module."
"""Part of the name of a weight that PEFT saves below a module of modules_to_save, and has no use
for, unless another module shares it."""
_KEY = "trainable_token_indices"
_MAX_RANK = 256
_ONE = {"F16": 0x3C00, "BF16": 0x3F80, "F32": 0x3F800000}


def most_bytes_of_rows(base: BaseModel) -> int:
    """Most bytes by which rows make a canonical object larger than the uploaded file."""
    shapes = (base.tensors[name].shape for name in base.places if name in base.tensors)
    sizes = (sum(shape) + MAX_ADDED_TOKENS for shape in shapes)
    return sum(_MAX_RANK * DTYPE_BYTES["F32"] * size for size in sizes)


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """The changed rows of an adapter.

    by_module: of the embedding and of the head, as PEFT would load them.   vocab_size: number of
    token ids, None unless the adapter adds tokens to the base model's.
    """

    by_module: "dict[str, Rows]"
    vocab_size: int | None
    warnings: list[str]


def find_rows(
    weights: "UploadedWeights", copies: Mapping[str, str], config: PeftConfig, max_rank: int
) -> TrainedRows:
    """Compare the uploaded weights of the ends with the base model's.

    copies: the base model's tensor by the name of its copy.   max_rank: most rows of a module.
    Raises InvalidAdapter; OSError if the base model's rows cannot be read.
    """
    ties = bool(weights.base.config.get("tie_word_embeddings"))
    held: dict[str, list[str]] = {}
    for name, copied in copies.items():
        module = END_WEIGHTS.get(copied)
        if module and (holder := _holder(name, module, config, ties)):
            held.setdefault(holder, []).append(name)
    by_end = {module: held.get(_holder("", module, config, ties) or "", []) for module in _ENDS}
    vocab_size = _vocab_size(weights, by_end)
    indices, tensors = _tokens(weights.header, config, ties)
    changed: dict[str, Rows] = {}
    warnings: list[str] = []
    for module, names in by_end.items():
        compare = _Comparison(weights, module, vocab_size, max_rank)
        rows = _agreed({name: compare.whole(name, warnings) for name in names})
        trained = indices.get(module, ())
        # PEFT puts trained tokens into the weight that it has loaded.
        rows = {token_id: row for token_id, row in rows.items() if token_id not in trained}
        rows |= _agreed({name: compare.tokens(name, trained) for name in tensors[module]})
        if rows:
            changed[module] = rows
    if changed and config.invocation_tokens is not None:
        raise file_fault(
            "unsupported_feature",
            f"alora_invocation_tokens of {CONFIG_FILE} is not served beside trained rows of "
            f"{next(iter(changed))}, which would apply before them, too; train without one of them",
            "alora_invocation_tokens",
        )
    return TrainedRows(changed, vocab_size, warnings)


def add_rows(
    weights: "UploadedWeights", modules: Mapping[str, ModuleScale], rows: TrainedRows, max_rank: int
) -> tuple[Header, dict[str, ModuleScale]]:
    """The tensors and modules of an adapter with its changed rows as LoRA. Raises InvalidAdapter.

    weights: with a header of checked tensors of LoRA alone.
    """
    import numpy as np

    tensors, effects = dict(weights.header.tensors), dict(modules)
    for module, changed in rows.by_module.items():
        found = effects.get(module, ModuleScale(0, 1.0))
        rank = found.rank + len(changed)
        if rank > max_rank:
            raise file_fault(
                "rank_too_large",
                f"{module} has LoRA of rank {found.rank} and {len(changed)} trained rows, which "
                f"together have rank {rank}; the limit is {max_rank}; train fewer of them",
            )
        is_embedding = module == EMBEDDING
        names = lora_names(module)[:: 1 if is_embedding else -1]  # of the large side, of the small
        large, small = (tensors.get(name) for name in names)
        values = np.stack(list(changed.values())) / np.float32(found.scale)
        if small is not None:
            raw = b"".join(read_tensor_chunks(weights.file, small))
            lora = decode(raw, small.dtype).reshape(small.shape)
            values = np.concatenate([lora.T if is_embedding else lora, values])
        size = rows.vocab_size or weights.base.config["vocab_size"]
        tensors[names[0]] = _ones(large, list(changed), rank, size, is_embedding)
        tensors[names[1]] = _kept(values.T if is_embedding else values)
        effects[module] = ModuleScale(rank, found.scale)
    return replace(weights.header, tensors=tensors), effects


# ---- which rows PEFT would load ----


def _holder(name: str, module: str, config: PeftConfig, ties: bool) -> str | None:
    """The weight that a copy is loaded into: the module's own, or "both"; None if nothing uses it.

    A module of modules_to_save has its own weight. All others are loaded into the base model, where
    a tied head and the embedding share one.
    """
    is_unused = _UNUSED_COPY in name
    are_saved_together = ties and config.ties_ends and any(map(config.saves, _ENDS))
    if is_unused and (are_saved_together or not ties):
        return None
    is_apart = config.saves(module) and not is_unused and not are_saved_together
    return module if is_apart or not ties else "both"


def _vocab_size(weights: "UploadedWeights", by_end: Mapping[str, list[str]]) -> int | None:
    """Number of rows of whole weights, if it is above the base model's; both ends must have them.

    by_end: names of the weights, by module.
    """
    known = weights.base.config["vocab_size"]
    sizes = {name: weights.num_rows(name) for names in by_end.values() for name in names}
    name = max(sizes, key=sizes.__getitem__, default="")
    if not name or (largest := sizes[name]) <= known:
        return None
    module = next((m for m in _ENDS if [sizes[name] for name in by_end[m]][:1] != [largest]), None)
    if module is None and largest <= known + MAX_ADDED_TOKENS:
        return largest
    raise file_fault(
        "wrong_shape",
        f"Tensor {shown(name)} has {largest} rows, the base model {known}. An adapter may add at "
        f"most {MAX_ADDED_TOKENS} tokens, to both {EMBEDDING} and {HEAD}; save it with "
        "save_embedding_layers=True, or train on this base model",
    )


def _tokens(
    header: Header, config: PeftConfig, ties: bool
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[str]]]:
    """Trained tokens, and the tensors with their rows, by module; both modules may have the same.

    A tied head has the embedding's, unless it has other tokens of its own.
    """
    indices = dict(config.token_indices)
    named = {name: module for name, module in TOKEN_TENSORS.items() if name in header.tensors}
    tensors = {m: [name for name, module in named.items() if module == m] for m in _ENDS}
    if ties and indices.get(HEAD) in (None, indices.get(EMBEDDING)) and EMBEDDING in indices:
        indices[HEAD] = indices[EMBEDDING]
        tensors = {module: tensors[EMBEDDING] and list(named) for module in _ENDS}
    for module in _ENDS:
        if bool(tensors[module]) != (module in indices):
            has, lacks = (WEIGHTS_FILE, CONFIG_FILE)[:: 1 if tensors[module] else -1]
            raise file_fault(
                "target_mismatch",
                f"{has} has trained tokens of {module}, {lacks} has none; save the adapter again "
                "with the configuration of its training",
                _KEY,
            )
        # A tied head may have LoRA beside the embedding's tokens.
        has_lora = lora_names(module)[0] in header.tensors and module in config.token_indices
        if module in indices and (config.saves(module) or has_lora):
            raise file_fault(
                "unsupported_feature",
                f"{_KEY} in {CONFIG_FILE} is not served for {module} beside LoRA or "
                "modules_to_save of it, as in PEFT; train without one of the two",
                _KEY,
            )
    return indices, tensors


def _agreed(found: "Mapping[str, Rows]") -> "Rows":
    """The rows of tensors that are loaded into one weight, by the tensors' names."""
    import numpy as np

    (first, rows), *others = found.items() or [("", {})]
    for name, other in others:
        if rows.keys() != other.keys() or not all(np.array_equal(rows[i], other[i]) for i in rows):
            raise file_fault(
                "unsupported_feature",
                f"Tensors {shown(first)} and {shown(name)} are of one weight, and differ: PEFT "
                "would load one over the other; save the adapter again",
            )
    return rows


# ---- comparing with the base model ----


@dataclass(frozen=True, slots=True)
class UploadedWeights:
    """An uploaded file, its header, and the base model that it is for."""

    file: BinaryIO
    header: Header
    base: BaseModel

    def num_rows(self, name: str) -> int:
        """Rows of a tensor, 0 if it is no matrix."""
        shape = self.header.tensors[name].shape
        return shape[0] if len(shape) == 2 else 0


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares uploaded rows with a module's. vocab_size, max_rank: see find_rows."""

    weights: UploadedWeights
    module: str
    vocab_size: int | None
    max_rank: int

    def whole(self, name: str, warnings: list[str]) -> "Rows":
        """Changed rows of a whole weight. Raises InvalidAdapter."""
        known, width = self._stored(name).shape
        num_rows = self.vocab_size or min(known, self.weights.num_rows(name))
        self._check(name, num_rows, width)
        if num_rows < known:
            warnings.append(
                f"The files have {num_rows} rows of {self.module}.weight; the base model's other "
                f"{known - num_rows} stay."
            )
        rows, count = self._changed(name, range(num_rows), CHUNK_BYTES)
        if count > self.max_rank:
            is_convertible = num_rows <= known
            raise file_fault(
                "unsupported_feature",
                f"Tensor {shown(name)}: training changed {count} of {num_rows} rows of "
                f"{self.module}, or it was saved from another base model than "
                f"{self.weights.base.model_id}; the limit is {self.max_rank} rows. Train it with "
                f"LoRA (target_modules), or a few tokens with {_KEY}"
                + "; or make a plain LoRA of it with `chorale adapters convert`"
                * is_convertible,
                "modules_to_save",
            )
        return rows

    def tokens(self, name: str, token_ids: Sequence[int]) -> "Rows":
        """Changed rows of trained tokens. Raises InvalidAdapter."""
        known, width = self._stored(name).shape
        self._check(name, len(token_ids), width)
        if len(token_ids) > self.max_rank:
            raise file_fault(
                "rank_too_large",
                f"{_KEY} of {CONFIG_FILE} has {len(token_ids)} tokens; the limit is "
                f"{self.max_rank}; train embed_tokens with LoRA (target_modules)",
                _KEY,
            )
        if max(token_ids) >= (size := self.vocab_size or known):
            raise file_fault(
                "invalid_config",
                f"{_KEY} of {CONFIG_FILE} has {max(token_ids)}; there are {size} tokens; train on "
                "this base model, and save added tokens with save_embedding_layers=True",
                _KEY,
            )
        return self._changed(name, token_ids, most_bytes=0)[0]

    def _stored(self, name: str) -> BaseTensor:
        base = self.weights.base
        stored = base.tensors.get(f"{self.module}.weight")
        if stored is None or stored.dtype not in ADAPTER_DTYPES or len(stored.shape) != 2:
            raise file_fault(
                "unsupported_feature",
                f"Tensor {shown(name)} has rows of {self.module}, which {base.model_id} stores "
                "quantised, so there is nothing to compare them with; train without it",
            )
        return stored

    def _check(self, name: str, num_rows: int, width: int) -> None:
        tensor = self.weights.header.tensors[name]
        if tensor.dtype not in ADAPTER_DTYPES:
            raise file_fault(
                "unsupported_dtype",
                f"Tensor {shown(name)} is {tensor.dtype}; save the adapter as F16, BF16 or F32",
            )
        if tensor.shape != (num_rows, width) or not num_rows:
            raise file_fault(
                "wrong_shape",
                f"Tensor {shown(name)} is {list(tensor.shape)}; its {num_rows} rows of "
                f"{self.weights.base.model_id} are [{num_rows}, {width}]; train on this base model",
            )

    def _changed(self, name: str, token_ids: Sequence[int], most_bytes: int) -> "tuple[Rows, int]":
        """Rows that are not the base model's, no more than max_rank, and how many there are.

        token_ids: of the tensor's rows. Rows that the base model lacks are zeros.
        most_bytes: of rows that are read at once, which have consecutive ids.
        """
        import numpy as np

        tensor, stored = self.weights.header.tensors[name], self._stored(name)
        place, (known, width) = self.weights.base.places[f"{self.module}.weight"], stored.shape
        new_bytes, old_bytes = (width * DTYPE_BYTES[each.dtype] for each in (tensor, stored))
        step = max(1, most_bytes // new_bytes)
        rows: Rows = {}
        count = 0
        for first in range(0, len(token_ids), step):
            ids = token_ids[first : first + step]
            start = tensor.start + first * new_bytes
            some = replace(tensor, start=start, end=start + len(ids) * new_bytes)
            raw = b"".join(read_tensor_chunks(self.weights.file, some))
            start, end = (min(token_id, known) * old_bytes for token_id in (ids[0], ids[-1] + 1))
            raw_old = place.read(start, end).ljust(len(ids) * old_bytes, b"\0")
            if raw == raw_old and tensor.dtype == stored.dtype:
                continue
            new = decode(raw, tensor.dtype).reshape(-1, width)
            old = decode(raw_old, stored.dtype).reshape(-1, width)
            if not np.isfinite(new).all():
                message = f"Tensor {shown(name)} has a NaN or an infinity; train again"
                raise file_fault("not_finite", message)
            # A copy in fewer bits is not a change.
            differ = (new != round_to(old, tensor.dtype)).any(axis=1).nonzero()[0].tolist()
            count += len(differ)
            if count <= self.max_rank:
                rows |= {ids[row]: new[row] - old[row] for row in differ}
        return rows, count


# ---- the LoRA ----


def _ones(
    lora: TensorInfo | None, token_ids: list[int], rank: int, vocab_size: int, is_embedding: bool
) -> MadeTensor:
    """The large side: a LoRA's, if there is one, then a one for each token, in the same dtype."""
    dtype = lora.dtype if lora else "BF16"

    def make(file: BinaryIO) -> Iterator[bytes]:
        import numpy as np

        ones = np.zeros((len(token_ids), vocab_size), f"<u{DTYPE_BYTES[dtype]}")
        ones[range(len(token_ids)), token_ids] = _ONE[dtype]
        if lora is not None:
            bits = np.frombuffer(b"".join(read_tensor_chunks(file, lora)), ones.dtype)
            bits = bits.reshape(lora.shape)
            ones = np.concatenate([bits if is_embedding else bits.T, ones])
        rows = ones if is_embedding else ones.T
        step = max(1, CHUNK_BYTES // (ones.itemsize * rows.shape[1]))
        yield from (rows[i : i + step].tobytes() for i in range(0, len(rows), step))

    shape = (rank, vocab_size) if is_embedding else (vocab_size, rank)
    return MadeTensor(dtype, shape, 0, prod(shape) * DTYPE_BYTES[dtype], make)


def _kept(values: Any) -> MadeTensor:
    """The small side, which stays in memory."""
    raw = values.astype("<f4").tobytes()
    return MadeTensor("F32", values.shape, 0, len(raw), lambda _: iter([raw]))
