"""Rows of the embedding and the head that training changed, served as an exact LoRA.

PEFT saves trained tokens as their new rows (`trainable_token_indices`), and a whole embedding or
head (`modules_to_save`, `save_embedding_layers`), of which most rows are often the base model's.
If n rows changed, the LoRA of rank n that turns the base model's rows into the new ones is

    embedding   A [n, vocab]    one in each row       B [hidden, n]   new - base
    head        A [n, hidden]   new - base            B [vocab, n]    one in each column

Rows come on top of a LoRA of the same module, and take its scale.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from registry.base_tensor import BaseTensor, TensorPlace
from registry.errors import InvalidAdapter, shown
from registry.peft_config import CONFIG_FILE, PeftConfig
from registry.peft_format import (
    ADAPTER_DTYPES,
    CHUNK_BYTES,
    DTYPE_BYTES,
    EMBEDDING,
    HEAD,
    WEIGHTS_FILE,
    Header,
    MadeTensor,
    ModuleScale,
    TensorInfo,
    lora_names,
    read_tensor_chunks,
)
from registry.tensor_values import decode, round_to

# Functions import numpy when they are called, as in registry.tensor_values.
if TYPE_CHECKING:
    import numpy as np

    Rows = dict[int, np.ndarray[Any, np.dtype[np.float32]]]
    """New minus old row by token id, [hidden] each."""

TRAINED_TOKENS = ".token_adapter.trainable_tokens_delta"
_UNUSED_COPY = ".original_module."
"""Part of the name of a weight that PEFT saves below a module of modules_to_save, and has no use
for, unless another module shares it."""
_ENDS = (EMBEDDING, HEAD)
END_WEIGHTS = {f"{module}.weight": module for module in _ENDS}
"""Modules of the ends by the names of their weights."""
_MAX_RANK = 256
_ONE = {"F16": 0x3C00, "BF16": 0x3F80, "F32": 0x3F800000}


class BaseRows(Protocol):
    """Properties of a base model that are used here; registry.base_model documents them."""

    @property
    def model_id(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, BaseTensor]: ...
    @property
    def places(self) -> Mapping[str, TensorPlace]: ...


@dataclass(frozen=True, slots=True)
class EndTensors:
    """The uploaded tensors of a model's ends that are no LoRA, by the module that they are of.

    copies: whole weights.   tokens: rows of trained tokens.
    """

    copies: Mapping[str, str]
    tokens: Mapping[str, str]

    @classmethod
    def of(cls, header: Header, copies: Mapping[str, str]) -> "EndTensors":
        """Collect them. copies: the base model's tensor by the name of its copy."""
        whole = {n: END_WEIGHTS[copied] for n, copied in copies.items() if copied in END_WEIGHTS}
        tokens = {
            name: module
            for name in header.tensors
            for module in _ENDS
            if name == f"base_model.model.{module}{TRAINED_TOKENS}"
        }
        return cls(whole, tokens)


def most_bytes_of_rows(base: BaseRows) -> int:
    """Most bytes by which rows make a canonical object larger than the uploaded file."""
    shapes = (base.tensors[name].shape for name in base.places if name in base.tensors)
    return sum(_MAX_RANK * DTYPE_BYTES["F32"] * sum(shape) for shape in shapes)


def find_rows(
    file: BinaryIO,
    header: Header,
    ends: EndTensors,
    config: PeftConfig,
    base: BaseRows,
    max_rank: int,
) -> "dict[str, Rows]":
    """The changed rows of the embedding and of the head, by module, as PEFT would load them.

    max_rank: most rows of a module.   Raises InvalidAdapter; OSError if the base model's rows
    cannot be read.
    """
    if not ends.copies and not ends.tokens and not config.token_indices:
        return {}
    reader = _Reader(file, header, base, max_rank)
    whole = _whole_rows(ends.copies, config, base, reader)
    tokens = _token_rows(ends.tokens, config, base, reader)
    changed: dict[str, Rows] = {}
    for module in _ENDS:
        # PEFT puts trained tokens into the weight that it has loaded.
        rows = {**whole.get(module, {}), **tokens.get(module, {})}
        if kept := {token_id: row for token_id, row in rows.items() if row.any()}:
            changed[module] = kept
    _check_combination(changed, tokens, header, config)
    return changed


def add_rows(
    file: BinaryIO,
    header: Header,
    modules: Mapping[str, ModuleScale],
    rows: "Mapping[str, Rows]",
    base: BaseRows,
    max_rank: int,
) -> tuple[Header, dict[str, ModuleScale]]:
    """The tensors and modules of an adapter with its changed rows as LoRA. Raises InvalidAdapter.

    header: of checked tensors of LoRA alone.
    """
    tensors, effects = dict(header.tensors), dict(modules)
    for module, changed in rows.items():
        found = effects.get(module, ModuleScale(0, 1.0))
        rank = found.rank + len(changed)
        if rank > max_rank:
            raise _fault(
                "rank_too_large",
                f"{module} has LoRA of rank {found.rank} and {len(changed)} trained rows, which "
                f"together have rank {rank}; the limit is {max_rank}; train fewer of them",
            )
        vocab_size = base.tensors[f"{module}.weight"].shape[0]
        name_of_a, name_of_b = lora_names(module)
        lora = (tensors[name_of_a], tensors[name_of_b]) if found.rank else None
        make = _embedding_pair if module == EMBEDDING else _head_pair
        tensors[name_of_a], tensors[name_of_b] = make(file, lora, changed, found.scale, vocab_size)
        effects[module] = ModuleScale(rank, found.scale)
    return replace(header, tensors=tensors), effects


# ---- which rows PEFT would load ----


def _whole_rows(
    copies: Mapping[str, str], config: PeftConfig, base: BaseRows, reader: "_Reader"
) -> "dict[str, Rows]":
    """Changed rows of whole weights.

    A module of modules_to_save has its own weight. All others are loaded into the base model, where
    a tied head and the embedding share one.
    """
    ties = bool(base.config.get("tie_word_embeddings"))
    saved = {module for module in _ENDS if config.saves(module)}
    are_saved_together = ties and config.ties_ends and bool(saved)
    if are_saved_together:
        saved = set(_ENDS)

    def holder(name: str, module: str) -> str | None:
        """The weight that a copy is loaded into; None if nothing uses it."""
        is_unused = _UNUSED_COPY in name
        if not ties or are_saved_together:
            return None if is_unused else EMBEDDING if are_saved_together else module
        return module if module in saved and not is_unused else "both"

    by_holder: dict[str, list[str]] = {}
    for name, module in copies.items():
        if (place := holder(name, module)) is not None:
            by_holder.setdefault(place, []).append(name)
    found = {
        place: _agreed(names, [reader.changed(name, copies[name]) for name in names])
        for place, names in by_holder.items()
    }
    rows = {module: found.get(holder(module, module) or "", {}) for module in _ENDS}
    return {module: changed for module, changed in rows.items() if changed}


def _token_rows(
    tensors: Mapping[str, str], config: PeftConfig, base: BaseRows, reader: "_Reader"
) -> "dict[str, Rows]":
    """Rows of trained tokens. A tied head has the embedding's, unless it has tokens of its own."""
    indices = {module: config.token_indices.get(module) for module in _ENDS}
    ours, theirs = indices[EMBEDDING], indices[HEAD]
    ties = bool(base.config.get("tie_word_embeddings"))
    are_shared = ties and ours is not None and theirs in (None, ours)
    by_module: dict[str, list[str]] = {module: [] for module in _ENDS}
    for name, module in tensors.items():
        by_module[EMBEDDING if are_shared else module].append(name)
    if are_shared:
        indices[HEAD] = None
    rows: dict[str, Rows] = {}
    for module, names in by_module.items():
        token_ids = indices[module]
        if bool(names) != (token_ids is not None):
            has, lacks = (names[0], CONFIG_FILE) if names else (CONFIG_FILE, WEIGHTS_FILE)
            raise InvalidAdapter(
                code="target_mismatch",
                message=f"{shown(has)} has trained tokens of {module}, {lacks} has none of it; "
                "save the adapter again with the configuration of its training.",
                param="trainable_token_indices",
            )
        if token_ids is not None:
            found = [reader.trained(name, module, token_ids) for name in names]
            rows[module] = _agreed(names, found)
    return rows | {HEAD: rows[EMBEDDING]} if are_shared else rows


def _agreed(names: list[str], found: "list[Rows]") -> "Rows":
    """The rows of tensors that are loaded into one weight."""
    import numpy as np

    first = found[0]
    for name, rows in zip(names, found, strict=True):
        if rows.keys() != first.keys() or any(
            not np.array_equal(row, first[token_id]) for token_id, row in rows.items()
        ):
            raise InvalidAdapter(
                code="unsupported_feature",
                message=f"Tensors {shown(names[0])} and {shown(name)} are of one weight, and "
                "differ: PEFT would load one over the other; save the adapter again.",
                param=WEIGHTS_FILE,
            )
    return first


def _check_combination(
    changed: "Mapping[str, Rows]", tokens: "Mapping[str, Rows]", header: Header, config: PeftConfig
) -> None:
    """Refuse what PEFT does not have, or what no LoRA is."""
    if changed and config.invocation_tokens is not None:
        raise InvalidAdapter(
            code="unsupported_feature",
            message=f"alora_invocation_tokens of {CONFIG_FILE} is not served beside trained rows "
            f"of {next(iter(changed))}, which would apply before them, too; train without one of "
            "the two.",
            param="alora_invocation_tokens",
        )
    for module in tokens:
        # A tied head may have LoRA beside the embedding's tokens.
        has_lora = lora_names(module)[0] in header.tensors and module in config.token_indices
        if config.saves(module) or has_lora:
            raise InvalidAdapter(
                code="unsupported_feature",
                message=f"trainable_token_indices in {CONFIG_FILE} is not served for {module} "
                "beside LoRA or modules_to_save of it, as in PEFT; train without one of the two.",
                param="trainable_token_indices",
            )


# ---- reading and comparing ----


@dataclass(frozen=True, slots=True)
class _Reader:
    """Compares uploaded tensors with the base model's. max_rank: most changed rows of a tensor."""

    file: BinaryIO
    header: Header
    base: BaseRows
    max_rank: int

    def changed(self, name: str, module: str) -> "Rows":
        """Rows of a whole weight that are not the base model's. Raises InvalidAdapter."""
        tensor, stored = self._tensor(name), self._stored(name, module)
        if tensor.shape != stored.shape:
            raise _fault(
                "wrong_shape",
                f"Tensor {shown(name)} is {list(tensor.shape)}, {module}.weight of "
                f"{self.base.model_id} is {list(stored.shape)}; train on this base model",
            )
        if stored.equals(self.file, tensor):
            return {}
        rows: Rows = {}
        count = 0
        for first, new, old in self._blocks(tensor, module):
            differs = (new != round_to(old, tensor.dtype)).any(axis=1)
            count += int(differs.sum())
            if count <= self.max_rank:
                for row in differs.nonzero()[0].tolist():
                    rows[first + row] = self._difference(name, new[row], old[row])
        if count > self.max_rank:
            raise InvalidAdapter(
                code="unsupported_feature",
                message=f"Tensor {shown(name)}: training changed {count} of {stored.shape[0]} rows "
                f"of {module}, or it was saved from another base model than {self.base.model_id}; "
                f"the limit is {self.max_rank} rows. Train {module.rpartition('.')[2]} with LoRA "
                "(target_modules), or a few tokens with trainable_token_indices; or make a plain "
                "LoRA of it with `chorale adapters convert`.",
                param="modules_to_save",
            )
        return rows

    def trained(self, name: str, module: str, token_ids: tuple[int, ...]) -> "Rows":
        """Rows of trained tokens, and of those that did not change zeros. Raises InvalidAdapter."""
        import numpy as np

        tensor, stored = self._tensor(name), self._stored(name, module)
        num_rows, width = stored.shape
        if tensor.shape != (len(token_ids), width):
            raise _fault(
                "wrong_shape",
                f"Tensor {shown(name)} is {list(tensor.shape)}; {len(token_ids)} trained tokens of "
                f"{self.base.model_id} are [{len(token_ids)}, {width}]; train on this base model",
            )
        if len(token_ids) > self.max_rank:
            raise InvalidAdapter(
                code="rank_too_large",
                message=f"trainable_token_indices of {CONFIG_FILE} has {len(token_ids)} tokens of "
                f"{module}; the limit is {self.max_rank}; train embed_tokens with LoRA "
                "(target_modules).",
                param="trainable_token_indices",
            )
        if max(token_ids) >= num_rows:
            raise InvalidAdapter(
                code="invalid_config",
                message=f"trainable_token_indices of {CONFIG_FILE} has {max(token_ids)}; "
                f"{module} of {self.base.model_id} has {num_rows} rows; train on this base model.",
                param="trainable_token_indices",
            )
        raw = b"".join(read_tensor_chunks(self.file, tensor))
        new = decode(raw, tensor.dtype).reshape(tensor.shape)
        rows: Rows = {}
        for token_id, row in zip(token_ids, new, strict=True):
            old = self._old(module, token_id, token_id + 1)[0]
            is_same = np.array_equal(row, round_to(old, tensor.dtype))
            rows[token_id] = np.zeros_like(old) if is_same else self._difference(name, row, old)
        return rows

    def _tensor(self, name: str) -> TensorInfo:
        tensor = self.header.tensors[name]
        if tensor.dtype not in ADAPTER_DTYPES:
            raise _fault(
                "unsupported_dtype",
                f"Tensor {shown(name)} is {tensor.dtype}; save the adapter as F16, BF16 or F32",
            )
        return tensor

    def _stored(self, name: str, module: str) -> BaseTensor:
        """The base model's tensor, with 16 or 32 bits for a value."""
        stored = self.base.tensors.get(f"{module}.weight")
        if stored is None or stored.dtype not in ADAPTER_DTYPES or len(stored.shape) != 2:
            raise _fault(
                "unsupported_feature",
                f"Tensor {shown(name)} has rows of {module}, which {self.base.model_id} stores "
                "quantised, so there is nothing to compare them with; train without it",
            )
        return stored

    def _blocks(self, tensor: TensorInfo, module: str) -> Iterator[tuple[int, Any, Any]]:
        """The number of the first row, and some rows of an uploaded tensor and of the base."""
        num_rows, width = tensor.shape
        step = _rows_at_once(tensor.size_bytes // num_rows)
        for first in range(0, num_rows, step):
            end = min(first + step, num_rows)
            raw = _read_rows(self.file, tensor, first, end)
            new = decode(raw, tensor.dtype).reshape(end - first, width)
            yield first, new, self._old(module, first, end)

    def _old(self, module: str, first: int, end: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Rows of the base model, [end - first, hidden]."""
        name = f"{module}.weight"
        stored = self.base.tensors[name]
        row_bytes = stored.shape[1] * DTYPE_BYTES[stored.dtype]
        raw = self.base.places[name].read(first * row_bytes, end * row_bytes)
        return decode(raw, stored.dtype).reshape(end - first, -1)

    def _difference(self, name: str, new: Any, old: Any) -> Any:
        import numpy as np

        if not np.isfinite(new).all():
            raise _fault(
                "not_finite", f"Tensor {shown(name)} has a NaN or an infinity; train again"
            )
        return new - old


def _read_rows(file: BinaryIO, tensor: TensorInfo, first: int, end: int) -> bytes:
    row_bytes = tensor.size_bytes // tensor.shape[0]
    start = tensor.start + first * row_bytes
    part = replace(tensor, start=start, end=start + (end - first) * row_bytes)
    return b"".join(read_tensor_chunks(file, part))


def _rows_at_once(row_bytes: int) -> int:
    return max(1, CHUNK_BYTES // max(1, row_bytes))


# ---- the LoRA ----

_Pair = tuple[TensorInfo, TensorInfo]


def _embedding_pair(
    file: BinaryIO, lora: _Pair | None, changed: "Rows", scale: float, vocab_size: int
) -> _Pair:
    import numpy as np

    columns = np.stack([row / np.float32(scale) for row in changed.values()], axis=1)
    if lora is not None:
        columns = np.concatenate([_read(file, lora[1]), columns], axis=1)
    dtype = lora[0].dtype if lora else "BF16"

    def make(file: BinaryIO) -> Iterator[bytes]:
        if lora is not None:
            yield from read_tensor_chunks(file, lora[0])
        for token_id in changed:
            row = np.zeros(vocab_size, _bits(dtype))
            row[token_id] = _ONE[dtype]
            yield row.tobytes()

    return _made(dtype, (columns.shape[1], vocab_size), make), _small(columns)


def _head_pair(
    file: BinaryIO, lora: _Pair | None, changed: "Rows", scale: float, vocab_size: int
) -> _Pair:
    import numpy as np

    rows = np.stack([row / np.float32(scale) for row in changed.values()])
    if lora is not None:
        rows = np.concatenate([_read(file, lora[0]), rows])
    dtype = lora[1].dtype if lora else "BF16"
    rank = len(rows)
    places = {token_id: rank - len(changed) + k for k, token_id in enumerate(changed)}

    def make(file: BinaryIO) -> Iterator[bytes]:
        step = _rows_at_once(rank * DTYPE_BYTES[dtype])
        for first in range(0, vocab_size, step):
            end = min(first + step, vocab_size)
            block = np.zeros((end - first, rank), _bits(dtype))
            if lora is not None:
                raw = _read_rows(file, lora[1], first, end)
                block[:, : rank - len(changed)] = np.frombuffer(raw, block.dtype).reshape(
                    end - first, -1
                )
            for token_id, place in places.items():
                if first <= token_id < end:
                    block[token_id - first, place] = _ONE[dtype]
            yield block.tobytes()

    return _small(rows), _made(dtype, (vocab_size, rank), make)


def _read(file: BinaryIO, tensor: TensorInfo) -> Any:
    raw = b"".join(read_tensor_chunks(file, tensor))
    return decode(raw, tensor.dtype).reshape(tensor.shape)


def _bits(dtype: str) -> str:
    """numpy's dtype for the bits of a value."""
    return f"<u{DTYPE_BYTES[dtype]}"


def _made(
    dtype: str, shape: tuple[int, int], make: Callable[[BinaryIO], Iterator[bytes]]
) -> MadeTensor:
    return MadeTensor(dtype, shape, 0, prod(shape) * DTYPE_BYTES[dtype], make)


def _small(values: Any) -> MadeTensor:
    """A tensor that is kept in memory."""
    raw = values.astype("<f4").tobytes()
    return _made("F32", values.shape, lambda _: iter([raw]))


def _fault(code: str, message: str) -> InvalidAdapter:
    return InvalidAdapter(code=code, message=f"{message}.", param=WEIGHTS_FILE)
