"""Reference implementations, in torch, of every kernel in `kernels.gpu`, under the same names.

Tests compare the kernels with them, and they run where there is no GPU. They are plain and slow,
and take tensors in host memory.
"""

import numpy as np
import torch
from torch.nn.functional import linear

from kernels import attention, elementwise, sampling
from kernels.block import adapter_blocks, places_of, scale_of
from kernels.elementwise import Activation
from kernels.packed import PackedWeight
from kernels.routing import Routing, choose_experts, group_by_expert, weighted_sum
from kernels.stacked import ExpertStack
from kernels.tiles import ADDRESS_UNIT_BYTES, MAX_RANK, RANK_ROWS
from kernels.work import (
    CHUNK_FEATURES,
    AttentionWork,
    Decode,
    Delta,
    HeadNorms,
    LoRAWork,
    PenaltyWork,
    SamplingWork,
    Site,
)

FP8 = torch.float8_e4m3fn
_PREFILL_QUERIES = 16
_EXPERT_ROWS = 16
FP8_MAX = 448.0


# ---- embedding, norms, activations, products ----


def embed(
    table: torch.Tensor, input_ids: torch.Tensor, sources: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    """Rows of the embedding, [T, hidden]: of previous[sources[t]] if sources[t] >= 0, else of
    input_ids[t].

    table: [vocab, hidden].   input_ids, sources: [T] int32.   previous: [..] int32, tokens of the
    step before; negative tokens, of rows that failed, count as 0.
    """
    chosen = previous[sources.clamp(min=0)]
    return table[torch.where(sources >= 0, chosen, input_ids).clamp(min=0)]


rms_norm = elementwise.rms_norm


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    finite: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x, in place; then rms_norm(residual).   residual, x: [T, dim].

    finite: [T] int32, set to 0 where the sum is not finite, else unchanged.
    """
    residual += x
    if finite is not None:
        finite[~elementwise.is_finite(residual)] = 0
    return elementwise.rms_norm(residual, weight, eps)


def gated(
    gate_up: torch.Tensor, activation: Activation, delta: Delta | None = None
) -> torch.Tensor:
    """silu(gate) * up or gelu(gate) * up, [T, intermediate], in float32 and rounded once.

    gate_up: [T, 2 * intermediate], gate first.   delta: is added to gate_up first.
    """
    wide = gate_up.float() if delta is None else gate_up.float() + _delta(delta, len(gate_up))
    gate, up = wide.chunk(2, dim=-1)
    return elementwise.gated(gate, up, activation).to(gate_up.dtype)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and float32 scales, [T, dim] and [T, 1], with value * scale near x.

    A row's scale is its own largest magnitude / 448; 1 for a row of zeros.   x: [T, dim].
    """
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def multiply_quantized(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, [T, out] in x's dtype. Sums are float32 and rounded once.

    x: [T, in].   bias: [out].   Weights are rounded to x's dtype, as if they were dense.
    """
    dense = weight.dequantize().to(x.dtype).float()
    return linear(x.float(), dense, None if bias is None else bias.float()).to(x.dtype)


# ---- mixtures of experts ----


def route(x: torch.Tensor, router: torch.Tensor, per_token: int, norms_weights: bool) -> Routing:
    """Choose each token's experts, and order the tokens by experts. The router's numbers are
    float32, and never rounded.

    x: [T, hidden].   router: [experts, hidden].   per_token, norms_weights: see `choose_experts`.
    A token whose numbers are not finite has some experts, and weights that are not finite.
    """
    logits = linear(x.float(), router.float())
    chosen, weights = choose_experts(logits, per_token, norms_weights=norms_weights)
    return group_by_expert(chosen, weights, len(router), _EXPERT_ROWS)


def multiply_experts(
    x: torch.Tensor, weight: ExpertStack, routing: Routing, is_grouped: bool = False
) -> torch.Tensor:
    """x @ weight.T with the weight of each pair's expert, [pairs, out] in x's dtype. Sums are
    float32 and rounded once.

    x: [T, in], and the results are in the order of `routing.pairs`. If x is grouped, x is in this
    order, [pairs, in], and the results are in the order of tokens: pair by pair.
    Weights are rounded to x's dtype, as if they were dense.
    """
    y = x.new_empty(len(routing.pairs), weight.out_features)
    for expert, first, count in routing.tiles.T.tolist():
        if count:
            places = torch.arange(first, first + count, device=x.device)
            pairs = routing.pairs[first : first + count].long()
            source, target = (places, pairs) if is_grouped else (pairs // routing.per_token, places)
            dense = weight.dequantize(expert).to(x.dtype).float()
            y[target] = linear(x[source].float(), dense).to(x.dtype)
    return y


def sum_experts(outputs: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Sum of each token's outputs by their weights, [T, hidden], in float32 and in order.

    outputs: [pairs, hidden], in the order of tokens.
    """
    return weighted_sum(outputs.unflatten(0, routing.weights.shape), routing.weights)


# ---- attention on paged KV ----
# `kv` is the KV of one layer: [slabs, 2, kv heads, block_size, head_dim], in the model's dtype or
# e4m3.


def rope_store_kv(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    finite: torch.Tensor,
    norms: HeadNorms | None = None,
    delta: Delta | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Rotate q and k by their positions, in place, and write k and v to their slots of `kv`.

    qkv: [T, (heads + 2 * kv heads) * head_dim]; afterwards q is rotated, k and v are undefined.
    cos, sin: [positions, dim / 2] float32; the first `dim` features of a head are rotated.
    positions: [T] int32.
    slots: [T] int32, block * block_size + offset; tokens with a negative slot are not stored.
    finite: [T] int32, set to 0 where k or v is not finite (such values are stored as 0), else
    unchanged.   kv_scales: what 1 in e4m3 stands for, of k and of v; not used by other dtypes.
    `delta` is added to qkv first, then `norms` are applied to the heads of q and k. Everything is
    computed in float32, and rounded where it is stored, and before and after `norms`.
    """
    _, _, kv_heads, block_size, dim = kv.shape
    if delta is not None:
        qkv.copy_((qkv.float() + _delta(delta, len(qkv))).to(qkv.dtype))
    heads = qkv.view(len(qkv), -1, dim)
    num_q = heads.shape[1] - 2 * kv_heads
    q, k, v = heads[:, :num_q], heads[:, num_q : num_q + kv_heads], heads[:, num_q + kv_heads :]
    if norms is not None:
        q.copy_(elementwise.rms_norm(q, norms.q, norms.eps))
        k.copy_(elementwise.rms_norm(k, norms.k, norms.eps))
    turn = cos[positions], sin[positions]
    q.copy_(elementwise.apply_rope(q.float(), *turn).to(q.dtype))
    k = elementwise.apply_rope(k.float(), *turn).to(q.dtype)
    pair = torch.stack((k, v), dim=1)
    finite[~elementwise.is_finite(pair.flatten(1))] = 0
    pair = pair.nan_to_num(0.0, 0.0, 0.0)
    if kv.dtype == FP8:
        scales = torch.tensor(kv_scales, device=pair.device).view(2, 1, 1)
        pair = (pair.float() / scales).clamp(-FP8_MAX, FP8_MAX)
    stored = (slots >= 0).nonzero().squeeze(1)
    blocks, offsets = slots[stored] // block_size, slots[stored] % block_size
    kv.permute(0, 3, 1, 2, 4)[blocks, offsets] = pair[stored].to(kv.dtype)


def decode_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    work: AttentionWork,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    """Attend for the rows that decode; tokens of other rows are left unchanged in `out`.

    out, q: [T, heads, head_dim].   window: only the last `window` positions are seen.
    scale: factor of the scores; None for 1 / sqrt(head_dim).   softcap: bound of the scores, see
    `kernels.elementwise.soft_cap_`; None without one.
    """
    for decode in (Decode(*ints) for ints in work.decodes.tolist()):
        if decode.num_sums:
            query, start = q[decode.token : decode.token + 1], decode.length - 1
            attended = _attend(query, kv, work, decode.block_start, start, window, scale, softcap)
            out[decode.token] = attended[0]


def prefill_queries(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Queries per tile of `prefill_attention`, for AttentionWork; any gives the same result."""
    return _PREFILL_QUERIES


def prefill_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    work: AttentionWork,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    """Attend causally for the rows that do not decode; other tokens of `out` are unchanged."""
    items = work.prefill_items[: int(work.num_prefill_items)]
    for row in items[:, 0].unique().tolist():
        first, end = work.query_starts[row : row + 2].tolist()
        start = int(work.seq_lens[row]) - (end - first)
        blocks = int(work.block_starts[row])
        out[first:end] = _attend(q[first:end], kv, work, blocks, start, window, scale, softcap)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    work: AttentionWork,
    block_start: int,
    start: int,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend with queries at positions start, start + 1, ... of one row; return like q."""
    num_blocks = -(-(start + len(q)) // kv.shape[3])
    blocks = work.blocks[block_start : block_start + num_blocks].tolist()
    wide = kv[:, None].to(q.dtype)
    return attention.prefill_attention(q, wide, 0, blocks, start, window, scale, softcap)


# ---- LoRA on arena tiles ----


def shrink(x: torch.Tensor, work: LoRAWork, site: Site) -> Delta:
    """planes[c, t, s * MAX_RANK + j] = scale * x[t, chunk c] @ A[j, chunk c], for every token t
    with an adapter, projection s of the site and rank row j of its tiles; the rest is undefined.

    x: [T, in_features].   Formula: Punica, arXiv 2310.18547, sec. 4. The sum over chunks of 512
    features is left to the expand; each chunk is summed in float32, and the chunks are always the
    same. Kernels may return one plane, the sum of all chunks in order.
    """
    columns = len(site.projections) * MAX_RANK
    planes = torch.full((site.num_chunks, len(x), columns), torch.nan, device=x.device)
    for block in adapter_blocks(work):
        rows = _rows(block)
        for number in range(len(site.projections)):
            scale = scale_of(work, site, block, number)
            for index, a, _ in _tiles(work, site, block, number):
                at = number * MAX_RANK + index * RANK_ROWS
                for chunk in range(site.num_chunks):
                    part = slice(chunk * CHUNK_FEATURES, (chunk + 1) * CHUNK_FEATURES)
                    h = x[rows, part].float() @ a[:, part].float().T
                    planes[chunk, rows, at : at + RANK_ROWS] = h * scale
    return Delta(planes, work, site)


def expand(y: torch.Tensor, delta: Delta) -> None:
    """y[t] += (sum over c of planes[c, t]) @ B in place, where t has an adapter.

    y: [T, sum of out_features].   The sum is rounded to the adapters' dtype once, as in PEFT. Its
    product with B is float32, and is added to y before y is rounded.
    """
    y.copy_((y.float() + _delta(delta, len(y))).to(y.dtype))


def _delta(delta: Delta, num_tokens: int) -> torch.Tensor:
    """Expand a delta: [T, sum of out_features] float32, zeros for tokens without an adapter."""
    work, site = delta.work, delta.site
    total = torch.zeros(num_tokens, sum(site.out_features), device=work.arena.device)
    for block in adapter_blocks(work):
        rows = _rows(block)
        for number, width in enumerate(site.out_features):
            out = total[rows, sum(site.out_features[:number]) :][:, :width]
            for index, _, b in _tiles(work, site, block, number):
                at = number * MAX_RANK + index * RANK_ROWS
                h = delta.planes[:, rows, at : at + RANK_ROWS].sum(0).to(b.dtype)
                out += h.float() @ b.float()
    return total


def _rows(block: np.void) -> slice:
    return slice(int(block["first"]), int(block["first"] + block["tokens"]))


def _tiles(
    work: LoRAWork, site: Site, block: np.void, number: int
) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """(index, A rows [8, in], B rows [8, out]) of each tile of the site's projection `number`."""
    in_features, out_features = site.in_features, site.out_features[number]
    elems = work.arena.view(-1)
    tiles = []
    for index, place in enumerate(places_of(work, site, block, number)):
        if place >= 0:
            first = place * ADDRESS_UNIT_BYTES // elems.element_size()
            middle = first + RANK_ROWS * in_features
            a = elems[first:middle].view(RANK_ROWS, in_features)
            b = elems[middle : middle + RANK_ROWS * out_features].view(RANK_ROWS, out_features)
            tiles.append((index, a, b))
    return tiles


# ---- slabs ----


def copy_slabs(
    target: torch.Tensor, target_ids: torch.Tensor, source: torch.Tensor, source_ids: torch.Tensor
) -> None:
    """target[target_ids[i]] = source[source_ids[i]] for all i at once.

    target, source: [slabs, slab_bytes] uint8.   Ids: [n] int32, those of the target distinct.
    """
    copied = source[source_ids.to(source.device)].to(target.device)
    target[target_ids.to(target.device)] = copied


# ---- choosing tokens ----


def adjust_logits(logits: torch.Tensor, work: PenaltyWork) -> None:
    """Apply the bias, then repetition, frequency and presence penalties, in place.

    logits: [B, vocab] float32.   Formulas: `kernels.sampling`.
    """
    vocab = logits.shape[1]
    for row in range(len(logits)):
        biased = slice(*work.bias_starts[row : row + 2].tolist())
        sampling.add_bias(logits, work.bias_tokens[biased] + row * vocab, work.bias[biased])
        entries = slice(*work.entry_starts[row : row + 2].tolist())
        seen, counts = work.entry_tokens[entries], work.entry_counts[entries]
        if (source := int(work.pending[row])) >= 0:
            last = work.previous[source : source + 1].clamp(min=0)
            seen, counts = torch.cat((seen, last)), torch.cat((counts, counts.new_ones(1)))
        at = seen.long() + row * vocab
        sampling.penalize_repetition(logits, at, work.repetition)
        said = at.repeat_interleave(counts)
        sampling.penalize_frequency(logits, said, work.frequency, work.presence)


def sample(logits: torch.Tensor, work: SamplingWork) -> torch.Tensor:
    """Choose a token for each row, [B] int32; -1 where a logit of the row is not finite.

    logits: [B, vocab] float32.   A row's choice depends on its own numbers only.
    Formulas: `probabilities`, `truncate` and `draw` of `kernels.sampling`, or argmax.
    """
    finite = logits.isfinite().all(dim=-1)
    sane = logits.nan_to_num(0.0, 0.0, 0.0)
    is_greedy = work.temperature <= 0
    probs = sampling.probabilities(sane, torch.where(is_greedy, 1.0, work.temperature))
    kept = sampling.truncate(probs, work.min_p, work.top_k.long(), work.top_p)
    drawn = sampling.draw(kept, work.uniform)
    tokens = torch.where(is_greedy, sane.argmax(dim=-1), drawn)
    return torch.where(finite, tokens, -1).int()
