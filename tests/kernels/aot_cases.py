"""Every host function of `kernels.gpu` at the shapes of two models, for `tests.kernels.aot`.

Nothing runs, so tensors are uninitialized; lists and tables are as large as an engine makes them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.block import BLOCK
from kernels.elementwise import Activation
from kernels.gpu import ops
from kernels.gpu.prefill_attention import prefill_queries
from kernels.packed import COLUMNS, GROUPS, STEP, PackedWeight, block_size
from kernels.quantized import Fp8Weight, Rounding
from kernels.reference import FP8
from kernels.routing import Routing
from kernels.stacked import DeviceWeight, ExpertStack
from kernels.tiles import MAX_RANK
from kernels.work import (
    SPLIT_KEYS,
    AttentionWork,
    Delta,
    HeadNorms,
    LoRAWork,
    PenaltyWork,
    SamplingWork,
    Site,
)
from lora.layout import Layout, ModelShape
from lora.sites import site_of

Call = Callable[[torch.dtype], object]

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128)
QWEN_HALF_B = ModelShape(24, 896, 4864, 14, 2, 64)

DECODE_TOKENS = 64
PREFILL_TOKENS = 2048
WINDOW = 4096
WIDE_ROW = 28672
"""The intermediate size of Llama 70B, which is wider than a tile of a row may be."""

_VOCAB = 128256
_CONTEXT = 8192
_NUM_ADAPTERS = 64
_LAYER = 3
_SITES = {"qkv": (0, 1, 2), "o": (3,), "gate_up": (4, 5), "down": (6,)}


@dataclass(frozen=True)
class Case:
    """One call of a host function; `min_arch` is the lowest architecture that it runs on."""

    name: str
    call: Call
    min_arch: int = 80


def shard_cases(model: str, shape: ModelShape, size: int) -> list[Case]:
    """Cases that differ on one of `size` ranks: rows of A or of B are shorter."""
    cases = _lora(shape.shard(size), DECODE_TOKENS)
    return [Case(f"{model} of {size} {c.name}", c.call, c.min_arch) for c in cases]


def cases_of(
    model: str, shape: ModelShape, decode_tokens: int = DECODE_TOKENS, window: int = WINDOW
) -> list[Case]:
    """All calls of a model's steps; a step of decodes has `decode_tokens` tokens."""
    named = [
        *_attention(shape, decode_tokens, window),
        *_lora(shape, decode_tokens),
        *_quantized(shape, decode_tokens),
        *_elementwise(shape, decode_tokens),
        *_sampling(decode_tokens),
    ]
    return [Case(f"{model} {c.name}", c.call, c.min_arch) for c in named]


# ---- attention ----


def _attention(shape: ModelShape, decode_tokens: int, sliding_window: int) -> Iterator[Case]:
    for kind, tokens in (("decode", decode_tokens), ("prefill", PREFILL_TOKENS)):
        attend, name = partial(_attend, kind, shape, tokens), f"{kind}_attention"
        for dtype, suffix, min_arch in ((None, "", 80), (FP8, " fp8", 89)):
            yield Case(f"{name}{suffix}", partial(attend, None, dtype), min_arch)
            yield Case(f"{name} window{suffix}", partial(attend, sliding_window, dtype), min_arch)
        yield Case(f"{name} capped", partial(attend, None, None, softcap=50.0))
    yield Case("attention of a mixed graph", partial(_mixed_attention, shape))
    for tokens, rows, step in ((decode_tokens, 16, "decode"), (PREFILL_TOKENS, 64, "prefill")):
        rope = partial(_rope_store_kv, shape, tokens)
        yield Case(f"rope_store_kv {step}", rope)
        yield Case(f"rope_store_kv {step} delta", partial(rope, block_rows=rows))
    rope = partial(_rope_store_kv, shape, decode_tokens, has_norms=True)
    yield Case("rope_store_kv norms", rope)
    yield Case("rope_store_kv norms delta", partial(rope, block_rows=16))
    rope = partial(_rope_store_kv, shape, decode_tokens, rotary_dim=3 * shape.head_dim // 4)
    yield Case("rope_store_kv partial delta", partial(rope, block_rows=16))
    rope = partial(_rope_store_kv, shape, decode_tokens, kv_dtype=FP8)
    yield Case("rope_store_kv fp8", rope, 89)
    yield Case("rope_store_kv fp8 delta", partial(rope, block_rows=16), 89)


def _attend(
    kind: str,
    shape: ModelShape,
    tokens: int,
    window: int | None,
    kv_dtype: torch.dtype | None,
    dtype: torch.dtype,
    softcap: float | None = None,
) -> None:
    """Attention of steps of this many decodes, or of prefills of so many tokens of 16 rows."""
    _, q = _qkv(shape, tokens, dtype)
    work = _attention_work(shape, tokens if kind == "decode" else 16, dtype)
    attend, kv = getattr(ops, f"{kind}_attention"), _kv(shape, kv_dtype or dtype)
    attend(torch.empty_like(q), q, kv, work, window, None, softcap)


def _mixed_attention(shape: ModelShape, dtype: torch.dtype) -> None:
    """The attention of the smallest mixed graph, with room for few items."""
    _, q = _qkv(shape, 128, dtype)
    work = _attention_work(shape, DECODE_TOKENS, dtype)
    work = replace(work, prefill_items=work.prefill_items[:20])
    for attend in (ops.decode_attention, ops.prefill_attention):
        attend(torch.empty_like(q), q, _kv(shape, dtype), work)


def _rope_store_kv(
    shape: ModelShape,
    tokens: int,
    dtype: torch.dtype,
    *,
    kv_dtype: torch.dtype | None = None,
    has_norms: bool = False,
    block_rows: int | None = None,
    rotary_dim: int | None = None,
) -> None:
    dim = shape.head_dim
    qkv, _ = _qkv(shape, tokens, dtype)
    norms = HeadNorms(_of(dtype, dim), _of(dtype, dim), 1e-6) if has_norms else None
    site = site_of(shape, _LAYER, _SITES["qkv"])
    delta = _delta(shape, site, tokens, block_rows, dtype) if block_rows else None
    half = (rotary_dim or dim) // 2
    turn = (torch.empty(_CONTEXT, half), torch.empty(_CONTEXT, half))
    kv = _kv(shape, kv_dtype or dtype)
    ops.rope_store_kv(qkv, kv, *turn, *(_ints(tokens) for _ in range(3)), norms, delta)


def _qkv(shape: ModelShape, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the qkv projection, and the q heads in it."""
    heads, dim = shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
    qkv = _of(dtype, tokens, heads * dim)
    return qkv, qkv.view(tokens, heads, dim)[:, : shape.num_heads]


def _kv(shape: ModelShape, dtype: torch.dtype) -> torch.Tensor:
    layout = Layout.of(shape, dtype.itemsize)
    slabs = _of(dtype, 2, layout.slab_bytes // dtype.itemsize)
    return slabs[:, : layout.kv_block_elems].view(2, *layout.kv_shape)[:, _LAYER]


def _attention_work(shape: ModelShape, rows: int, dtype: torch.dtype) -> AttentionWork:
    queries = prefill_queries(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, torch.device("cpu")
    )
    return AttentionWork(
        query_starts=_ints(rows + 1),
        seq_lens=_ints(rows),
        block_starts=_ints(rows),
        blocks=_ints(rows * _CONTEXT // 16),
        decodes=_ints(rows, 7),
        decode_items=_ints(rows * _CONTEXT // SPLIT_KEYS, 2),
        num_decode_items=_ints(1),
        prefill_items=_ints(PREFILL_TOKENS // queries + rows, 2),
        num_prefill_items=_ints(1),
        prefill_queries=queries,
    )


# ---- LoRA ----


def _lora(shape: ModelShape, decode_tokens: int) -> Iterator[Case]:
    for tokens, rows, step in ((decode_tokens, 16, "decode"), (PREFILL_TOKENS, 64, "prefill")):
        for name, projections in _SITES.items():
            site = site_of(shape, _LAYER, projections)
            delta = partial(_delta, shape, site, tokens, rows)
            yield Case(f"shrink {step} {name}", partial(_shrink, tokens, delta))
            yield Case(f"expand {step} {name}", partial(_expand, tokens, delta))


def _shrink(tokens: int, delta: Callable[[torch.dtype], Delta], dtype: torch.dtype) -> None:
    made = delta(dtype)
    ops.shrink(_of(dtype, tokens, made.site.in_features), made.work, made.site)


def _expand(tokens: int, delta: Callable[[torch.dtype], Delta], dtype: torch.dtype) -> None:
    made = delta(dtype)
    ops.expand(_of(dtype, tokens, sum(made.site.out_features)), made)


def _delta(
    shape: ModelShape, site: Site, tokens: int, block_rows: int, dtype: torch.dtype
) -> Delta:
    # `shrink` returns one plane for large blocks, the sum of all.
    num_planes = site.num_chunks if block_rows == 16 else 1
    planes = torch.empty(num_planes, tokens, len(site.projections) * MAX_RANK)
    return Delta(planes, _lora_work(shape, tokens, block_rows, dtype), site)


def _lora_work(shape: ModelShape, tokens: int, block_rows: int, dtype: torch.dtype) -> LoRAWork:
    slab_elems = Layout.of(shape, dtype.itemsize).slab_bytes // dtype.itemsize
    blocks = tokens // block_rows + _NUM_ADAPTERS
    return LoRAWork(
        arena=_of(dtype, 2, slab_elems),
        blocks=_ints(blocks, BLOCK.itemsize // 4),
        pairs=_ints(blocks * MAX_RANK // 16, 2),
        counts=_ints(2),
        block_rows=block_rows,
    )


# ---- products with weights in few bits ----

_ROUNDINGS = {
    "4 bits": Rounding(4, 32),
    "4 bits with zeros": Rounding(4, 128, has_zeros=True),
    "8 bits": Rounding(8),
}
_FEWEST_ROWS = 16
"""Tokens of the smallest tile: a step of fewer takes the same kernels."""


def _quantized(shape: ModelShape, decode_tokens: int) -> Iterator[Case]:
    few = min(decode_tokens, _FEWEST_ROWS)
    for name, rounding in _ROUNDINGS.items():
        multiply = partial(_multiply_quantized, shape, rounding)
        yield Case(f"multiply_quantized decode {name}", partial(multiply, few))
        yield Case(f"multiply_quantized prefill {name}", partial(multiply, 256))
        # The product is torch's, so that here a CPU computes it.
        yield Case(f"multiply_quantized dense {name}", partial(multiply, 257))
    for tokens in (32, 64):
        multiply = partial(_multiply_quantized, shape, _ROUNDINGS["4 bits"], tokens)
        yield Case(f"multiply_quantized {tokens} tokens", multiply)


def _multiply_quantized(
    shape: ModelShape, rounding: Rounding, tokens: int, dtype: torch.dtype
) -> None:
    """Multiply by the weight of k, whose inputs are split, if there are few tokens."""
    in_features, out_features = shape.features(1)
    weight = _packed(rounding, in_features, out_features)
    ops.multiply_quantized(_of(dtype, tokens, in_features), weight, _of(dtype, out_features))


def _packed(rounding: Rounding, in_features: int, out_features: int) -> PackedWeight:
    blocks = -(-in_features // block_size(rounding.bits))
    columns = -(-out_features // COLUMNS) * COLUMNS
    groups = in_features // (rounding.group_size or in_features)
    codes = _of(torch.int16, blocks, STEP, columns)
    pairs = _of(torch.float16, -(-groups // GROUPS), columns, GROUPS)
    zeros = pairs if rounding.has_zeros else None
    scales = pairs if rounding.group_size else torch.empty(groups, columns)
    return PackedWeight(rounding, in_features, out_features, codes, scales, zeros)


# ---- mixtures of experts ----


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts."""

    hidden: int
    width: int
    experts: int
    per_token: int


QWEN_30B_A3B = Mixture(2048, 768, 128, 8)
MIXTRAL_8X7B = Mixture(4096, 14336, 8, 2)


def expert_cases(model: str, mixture: Mixture, decode_tokens: int = DECODE_TOKENS) -> list[Case]:
    """All calls of a layer of experts."""
    found = []
    for step, tokens in (("decode", decode_tokens), ("prefill", PREFILL_TOKENS)):
        found.append(Case(f"{model} route {step}", partial(_route, mixture, tokens, True)))
        found.append(Case(f"{model} route {step} plain", partial(_route, mixture, tokens, False)))
        for form in ("dense", "fp8", *_ROUNDINGS):
            run = partial(_run_experts, mixture, tokens, form)
            min_arch = 89 if form == "fp8" else 80
            found.append(Case(f"{model} experts {step} {form}", run, min_arch))
    return found


def _route(mixture: Mixture, tokens: int, norms: bool, dtype: torch.dtype) -> Routing:
    router = _of(dtype, mixture.experts, mixture.hidden)
    return ops.route(_of(dtype, tokens, mixture.hidden), router, mixture.per_token, norms)


def _run_experts(mixture: Mixture, tokens: int, form: str, dtype: torch.dtype) -> None:
    routing = _route(mixture, tokens, True, dtype)
    gate_up, down = (
        ExpertStack.empty(_weight(form, dtype, *sizes), mixture.experts)
        for sizes in ((mixture.hidden, 2 * mixture.width), (mixture.width, mixture.hidden))
    )
    ops.multiply_experts(_of(dtype, tokens, mixture.hidden), gate_up, routing)
    activated = _of(dtype, tokens * mixture.per_token, mixture.width)
    ops.sum_experts(ops.multiply_experts(activated, down, routing, True), routing)


def _weight(form: str, dtype: torch.dtype, in_features: int, out_features: int) -> DeviceWeight:
    if form in _ROUNDINGS:
        return _packed(_ROUNDINGS[form], in_features, out_features)
    if form == "fp8":
        return Fp8Weight(_of(FP8, out_features, in_features), torch.empty(out_features, 1))
    return _of(dtype, out_features, in_features)


# ---- norms, activations, embedding ----


def _elementwise(shape: ModelShape, tokens: int) -> Iterator[Case]:
    hidden, width = shape.hidden_size, shape.intermediate_size

    def add_rms_norm(finite: torch.Tensor | None, dtype: torch.dtype) -> None:
        residual, x = (_of(dtype, tokens, hidden) for _ in range(2))
        ops.add_rms_norm(residual, x, _of(dtype, hidden), 1e-5, finite)

    def gated(activation: Activation, tokens: int, block_rows: int, dtype: torch.dtype) -> None:
        site = site_of(shape, _LAYER, _SITES["gate_up"])
        delta = _delta(shape, site, tokens, block_rows, dtype) if block_rows else None
        ops.gated(_of(dtype, tokens, 2 * width), activation, delta)

    calls: dict[str, Call] = {
        "embed": lambda dtype: ops.embed(
            _of(dtype, _VOCAB, hidden), _ints(tokens), _ints(tokens), _ints(DECODE_TOKENS)
        ),
        "rms_norm": lambda dtype: ops.rms_norm(
            _of(dtype, tokens, hidden), _of(dtype, hidden), 1e-5
        ),
        "add_rms_norm": partial(add_rms_norm, None),
        "add_rms_norm finite": partial(add_rms_norm, _ints(tokens)),
        "gated": partial(gated, "silu", tokens, 0),
        "gated gelu": partial(gated, "gelu_tanh", tokens, 0),
        "gated decode delta": partial(gated, "silu", tokens, 16),
        "gated prefill delta": partial(gated, "silu", PREFILL_TOKENS, 64),
    }
    yield from (Case(name, call) for name, call in calls.items())
    for name, columns in (("quantize_fp8", width), ("quantize_fp8 wide", WIDE_ROW)):
        yield Case(name, partial(_quantize_fp8, columns, tokens), 89)


def _quantize_fp8(columns: int, tokens: int, dtype: torch.dtype) -> None:
    ops.quantize_fp8(_of(dtype, tokens, columns))


# ---- sampling, slabs ----


def _sampling(rows: int) -> Iterator[Case]:
    yield Case("adjust_logits", partial(_adjust_logits, rows))
    yield Case("sample", partial(_sample, rows))


def _adjust_logits(rows: int, _: torch.dtype) -> None:
    work = PenaltyWork(
        entry_starts=_ints(rows + 1),
        entry_tokens=_ints(1000),
        entry_counts=_ints(1000),
        pending=_ints(rows),
        previous=_ints(rows),
        repetition=torch.empty(rows),
        frequency=torch.empty(rows),
        presence=torch.empty(rows),
        bias_starts=_ints(rows + 1),
        bias_tokens=_ints(300),
        bias=torch.empty(300),
    )
    ops.adjust_logits(torch.empty(rows, _VOCAB), work)


def _sample(rows: int, _: torch.dtype) -> None:
    work = SamplingWork(
        temperature=torch.empty(rows),
        min_p=torch.empty(rows, dtype=torch.float64),
        top_p=torch.empty(rows, dtype=torch.float64),
        top_k=_ints(rows),
        uniform=torch.empty(rows, dtype=torch.float64),
    )
    ops.sample(torch.empty(rows, _VOCAB), work)


def _copy_slabs(dtype: torch.dtype) -> None:
    slab_bytes = Layout.of(LLAMA_8B, dtype.itemsize).slab_bytes
    target, source = (torch.empty(2, slab_bytes, dtype=torch.uint8) for _ in range(2))
    ops.copy_slabs(target, _ints(7), source, _ints(7))


def _of(dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype)


def _ints(*size: int) -> torch.Tensor:
    return torch.empty(*size, dtype=torch.int32)


COPY_SLABS = Case("copy_slabs", _copy_slabs)
LARGE = [
    *cases_of("8b", LLAMA_8B),
    *expert_cases("30b-a3b", QWEN_30B_A3B),
    *expert_cases("8x7b", MIXTRAL_8X7B),
    COPY_SLABS,
]
SMALL = cases_of("0.5b", QWEN_HALF_B)
SHARDS = shard_cases("8b", LLAMA_8B, 2) + shard_cases("8b", LLAMA_8B, 8)
CASES = [*LARGE, *SMALL, *SHARDS]

ODD_STEPS = {
    tokens: [
        *cases_of(f"{tokens} decodes 8b", LLAMA_8B, tokens),
        *expert_cases(f"{tokens} decodes 30b-a3b", QWEN_30B_A3B, tokens),
    ]
    for tokens in (1, 2)
}
"""Cases with numbers of tokens that Triton specialises for: 1, and no multiple of 16."""
