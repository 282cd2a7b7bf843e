"""Rows of the embedding and the head that training changed, served as an exact LoRA.

PEFT saves trained tokens as their new rows (`trainable_token_indices`), and a whole embedding or
head (`modules_to_save`, `save_embedding_layers`), of which most rows are often the base model's.
If n rows changed, the LoRA of rank n that turns the base model's rows into the new ones is

    embedding   A [n, vocab]    one in each row       B [hidden, n]   new - base
    head        A [n, hidden]   new - base            B [vocab, n]    one in each column

Rows come on top of a LoRA of the same module, and take its scale.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    MAX_ADDED_TOKENS,
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


def most_bytes_of_rows(base: BaseRows) -> int:
    """Most bytes by which rows make a canonical object larger than the uploaded file."""
    shapes = (base.tensors[name].shape for name in base.places if name in base.tensors)
    sizes = (sum(shape) + MAX_ADDED_TOKENS for shape in shapes)
    return sum(_MAX_RANK * DTYPE_BYTES["F32"] * size for size in sizes)


def find_rows(
    file: BinaryIO,
    header: Header,
    copies: Mapping[str, str],
    config: PeftConfig,
    base: BaseRows,
    max_rank: int,
) -> "tuple[dict[str, Rows], int | None]":
    """The changed rows of the embedding and of the head, by module, as PEFT would load them, and
    the number of token ids, None unless the adapter adds tokens to the base model's.

    copies: the base model's tensor by the name of its copy.   max_rank: most rows of a module.
    Raises InvalidAdapter; OSError if the base model's rows cannot be read.
    """
    ties = bool(base.config.get("tie_word_embeddings"))
    held = {
        name: (module, holder)
        for name, copied in copies.items()
        if (module := END_WEIGHTS.get(copied)) and (holder := _holder(name, module, config, ties))
    }
    vocab_size = _vocab_size(header, held, config, base)

    def read(name: str, module: str, token_ids: Sequence[int] | None = None) -> "Rows":
        tensor = header.tensors[name]
        return _changed(file, name, tensor, token_ids, module, base, max_rank, vocab_size)

    whole: dict[str, dict[str, Rows]] = {}
    for name, (module, holder) in held.items():
        whole.setdefault(holder, {})[name] = read(name, module)
    indices, tensors = _tokens(header, config, ties)
    changed: dict[str, Rows] = {}
    for module in _ENDS:
        trained = indices.get(module, ())
        rows = _agreed(whole.get(_holder("", module, config, ties) or "", {}))
        rows = {token_id: row for token_id, row in rows.items() if token_id not in trained}
        # PEFT puts trained tokens into the weight that it has loaded.
        rows |= _agreed({name: read(name, module, trained) for name in tensors.get(module, ())})
        if rows:
            changed[module] = rows
    if changed and config.invocation_tokens is not None:
        raise _refused(
            "unsupported_feature",
            f"alora_invocation_tokens of {CONFIG_FILE} is not served beside trained rows of "
            f"{next(iter(changed))}, which would apply before them, too; train without one of them",
            "alora_invocation_tokens",
        )
    return changed, vocab_size


def add_rows(
    file: BinaryIO,
    header: Header,
    modules: Mapping[str, ModuleScale],
    rows: "Mapping[str, Rows]",
    vocab_size: int,
    max_rank: int,
) -> tuple[Header, dict[str, ModuleScale]]:
    """The tensors and modules of an adapter with its changed rows as LoRA. Raises InvalidAdapter.

    header: of checked tensors of LoRA alone.   vocab_size: number of the adapter's token ids.
    """
    import numpy as np

    tensors, effects = dict(header.tensors), dict(modules)
    for module, changed in rows.items():
        found = effects.get(module, ModuleScale(0, 1.0))
        rank = found.rank + len(changed)
        if rank > max_rank:
            raise _refused(
                "rank_too_large",
                f"{module} has LoRA of rank {found.rank} and {len(changed)} trained rows, which "
                f"together have rank {rank}; the limit is {max_rank}; train fewer of them",
            )
        is_embedding = module == EMBEDDING
        names = lora_names(module)[:: 1 if is_embedding else -1]  # of the large side, of the small
        large, small = (tensors.get(name) for name in names)
        values = np.stack(list(changed.values())) / np.float32(found.scale)
        if small is not None:
            raw = b"".join(read_tensor_chunks(file, small))
            lora = decode(raw, small.dtype).reshape(small.shape)
            values = np.concatenate([lora.T if is_embedding else lora, values])
        tensors[names[0]] = _ones(large, list(changed), rank, vocab_size, is_embedding)
        tensors[names[1]] = _kept(values.T if is_embedding else values)
        effects[module] = ModuleScale(rank, found.scale)
    return replace(header, tensors=tensors), effects


# ---- which rows PEFT would load ----


def _vocab_size(
    header: Header, held: Mapping[str, tuple[str, str]], config: PeftConfig, base: BaseRows
) -> int | None:
    """Number of rows of the whole weights, if it is above the base model's. Both ends must have it.

    held: modules and holders of whole weights, by name.
    """
    known = base.config["vocab_size"]
    shapes = {holder: header.tensors[name].shape for name, (_, holder) in held.items()}
    sizes = {holder: shape[0] for holder, shape in shapes.items() if len(shape) == 2}
    largest = max(sizes.values(), default=0)
    if largest <= known:
        return None
    name = next(name for name, (_, holder) in held.items() if sizes.get(holder) == largest)
    if largest > known + MAX_ADDED_TOKENS:
        raise _refused(
            "wrong_shape",
            f"Tensor {shown(name)} has {largest} rows, the base model {known}; an adapter may add "
            f"at most {MAX_ADDED_TOKENS} tokens; train on this base model",
        )
    ties = bool(base.config.get("tie_word_embeddings"))
    for module in _ENDS:
        if sizes.get(_holder("", module, config, ties) or "") != largest:
            raise _refused(
                "wrong_shape",
                f"Tensor {shown(name)} has {largest} rows, and {module} has no weight with as many "
                "beside it; save the adapter with save_embedding_layers=True",
            )
    return largest


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
            raise _refused(
                "target_mismatch",
                f"{has} has trained tokens of {module}, {lacks} has none; save the adapter again "
                "with the configuration of its training",
                _KEY,
            )
        # A tied head may have LoRA beside the embedding's tokens.
        has_lora = lora_names(module)[0] in header.tensors and module in config.token_indices
        if module in indices and (config.saves(module) or has_lora):
            raise _refused(
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
            raise _refused(
                "unsupported_feature",
                f"Tensors {shown(first)} and {shown(name)} are of one weight, and differ: PEFT "
                "would load one over the other; save the adapter again",
            )
    return rows


# ---- comparing with the base model ----


def _changed(
    file: BinaryIO,
    name: str,
    tensor: TensorInfo,
    token_ids: Sequence[int] | None,
    module: str,
    base: BaseRows,
    max_rank: int,
    vocab_size: int | None,
) -> "Rows":
    """Rows of an uploaded tensor that are not the base model's. Raises InvalidAdapter.

    token_ids: of the tensor's rows; None for a whole weight. Rows that the base model lacks are
    zeros.   vocab_size: number of token ids; None for the base model's.
    """
    stored = base.tensors.get(f"{module}.weight")
    if stored is None or stored.dtype not in ADAPTER_DTYPES or len(stored.shape) != 2:
        raise _refused(
            "unsupported_feature",
            f"Tensor {shown(name)} has rows of {module}, which {base.model_id} stores quantised, "
            "so there is nothing to compare them with; train without it",
        )
    known, width = stored.shape
    num_rows = min([known, *tensor.shape[:1]]) if vocab_size is None else vocab_size
    ids = range(num_rows) if token_ids is None else token_ids
    _check(name, tensor, ids, (vocab_size or known, width), max_rank)
    place = base.places[f"{module}.weight"]
    row_bytes, old_bytes = (width * DTYPE_BYTES[dtype] for dtype in (tensor.dtype, stored.dtype))
    step = max(1, CHUNK_BYTES // row_bytes) if token_ids is None else 1
    rows: Rows = {}
    count = 0
    for first in range(0, len(ids), step):
        some = ids[first : first + step]
        start = tensor.start + first * row_bytes
        part = replace(tensor, start=start, end=start + len(some) * row_bytes)
        raw = b"".join(read_tensor_chunks(file, part))
        start, end = min(some[0], known) * old_bytes, min(some[-1] + 1, known) * old_bytes
        raw_old = place.read(start, end).ljust(len(some) * old_bytes, b"\0")
        if raw == raw_old and tensor.dtype == stored.dtype:
            continue
        new = decode(raw, tensor.dtype).reshape(len(some), -1)
        old = decode(raw_old, stored.dtype).reshape(new.shape)
        # A copy in fewer bits is not a change.
        differ = (new != round_to(old, tensor.dtype)).any(axis=1).nonzero()[0].tolist()
        count += len(differ)
        if count <= max_rank:
            rows |= {some[row]: _difference(name, new[row], old[row]) for row in differ}
    if count > max_rank:
        raise _refused(
            "unsupported_feature",
            f"Tensor {shown(name)}: training changed {count} of {len(ids)} rows of {module}, or it "
            f"was saved from another base model than {base.model_id}; the limit is {max_rank} "
            f"rows. Train {module.rpartition('.')[2]} with LoRA (target_modules), or a few tokens "
            f"with {_KEY}; or make a plain LoRA of it with `chorale adapters convert`",
            "modules_to_save",
        )
    return rows


def _check(
    name: str, tensor: TensorInfo, ids: Sequence[int], shape: tuple[int, ...], max_rank: int
) -> None:
    """Check a tensor with rows of these tokens. shape: of the base model's weight."""
    if tensor.dtype not in ADAPTER_DTYPES:
        raise _refused(
            "unsupported_dtype",
            f"Tensor {shown(name)} is {tensor.dtype}; save the adapter as F16, BF16 or F32",
        )
    if tensor.shape != (len(ids), shape[1]) or not ids:
        raise _refused(
            "wrong_shape",
            f"Tensor {shown(name)} is {list(tensor.shape)}; its {len(ids)} rows of the base model "
            f"are [{len(ids)}, {shape[1]}]; train on this base model",
        )
    if isinstance(ids, range):
        return
    if len(ids) > max_rank:
        raise _refused(
            "rank_too_large",
            f"{_KEY} of {CONFIG_FILE} has {len(ids)} tokens; the limit is {max_rank}; train "
            "embed_tokens with LoRA (target_modules)",
            _KEY,
        )
    if max(ids) >= shape[0]:
        raise _refused(
            "invalid_config",
            f"{_KEY} of {CONFIG_FILE} has {max(ids)}; there are {shape[0]} tokens; train on this "
            "base model, and save added tokens with save_embedding_layers=True",
            _KEY,
        )


def _difference(name: str, new: Any, old: Any) -> Any:
    import numpy as np

    if not np.isfinite(new).all():
        raise _refused("not_finite", f"Tensor {shown(name)} has a NaN or an infinity; train again")
    return new - old


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


def _refused(code: str, message: str, param: str = WEIGHTS_FILE) -> InvalidAdapter:
    return InvalidAdapter(code=code, message=f"{message}.", param=param)
