"""Attention on paged KV beside torch's own: decodes by the bytes of K and V, prefills by FLOPs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu import goals
from bench.gpu.adapters import make_form
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import attempt, check_close
from bench.gpu.machine import Machine, Work
from bench.gpu.rows import Row
from bench.gpu.steps import deal_blocks, make_rows, make_step
from bench.report import rounded
from engine.gpu.inputs import StepInputs
from kernels.gpu import ops
from lora.layout import Layout

_BLOCK_SIZE = 16
_KV_SHARE = 0.4
"""Most of the device's memory that the KV of a case may take; torch's comparison has its own."""
_CHECKED_ROWS, _CHECKED_QUERIES = 4, 64


def rows(machine: Machine, ceilings: Ceilings) -> Iterator[Row]:
    """Yield the rows, the most important first."""
    batches, contexts = machine.pick(((64, 1, 16), (4096, 1024, 16384)), ((3,), (40, 600)))
    cases = [(batch, context) for batch in batches for context in contexts]
    yield from (_decode_row(machine, ceilings, *case) for case in cases[:2])
    for tokens, context in machine.pick(((2048, 0), (2048, 6144), (8192, 0)), ((33, 0), (20, 40))):
        setup = {"tokens": tokens, "context": context}
        measure = partial(_prefill, machine, ceilings, tokens, context)
        yield Row("gpu.prefill_attention", setup, measure)
    batch, context = machine.pick((64, 4096), (3, 40))
    setup = {"batch": batch, "context": context}
    yield Row("gpu.shared_prefix", setup, partial(_shared, machine, batch, context))
    yield from (_decode_row(machine, ceilings, *case) for case in cases[2:])


def _decode_row(machine: Machine, ceilings: Ceilings, batch: int, context: int) -> Row:
    layers = _num_layers(machine, batch * context * _token_bytes(machine))
    setup = {"layers": layers, "batch": batch, "context": context}
    return Row("gpu.decode_attention", setup, partial(_decode, machine, ceilings, batch, context))


@dataclass(frozen=True)
class _Case:
    """Inputs of attention in one step.

    q: [T, heads, head_dim], a part of a wider tensor.   kv: [slabs, layers, 2, kv heads,
    block_size, head_dim]; together the layers are larger than any cache.
    """

    step: StepInputs
    q: torch.Tensor
    kv: torch.Tensor
    blocks: list[list[int]]

    @property
    def num_layers(self) -> int:
        return self.kv.shape[1]

    def row_kv(self, row: int, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one row, [kv heads, length, head_dim] each."""
        own = self.kv[self.blocks[row], layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
        k, v = own[:, :, :length]
        return k, v

    def work(self, attend: Any, out: torch.Tensor) -> Work:
        """Return work that runs `attend` once on every layer."""

        def run() -> None:
            for layer in range(self.num_layers):
                attend(out, self.q, self.kv[:, layer], self.step.attention)

        return run


def _shared(machine: Machine, batch: int, context: int) -> dict[str, float]:
    """Time a batch of rows with blocks of their own, a batch with shared blocks, and one row alone.
    A kernel that read the shared blocks once could save the time that the shared batch takes beyond
    the one row.
    """

    def seconds(num_rows: int, is_shared: bool = False) -> float:
        lengths = [(context - 1, 1)] * num_rows
        case = _make_case(machine, lengths, is_shared)
        return _checked_decode_s(machine, case, context)

    return {
        "apart_us": rounded(1e6 * seconds(batch)),
        "shared_us": rounded(1e6 * seconds(batch, is_shared=True)),
        "one_row_us": rounded(1e6 * seconds(1)),
    }


def _checked_decode_s(machine: Machine, case: _Case, context: int) -> float:
    """Check the first rows of a decode, then return the seconds that it takes per layer."""
    out = torch.full(case.q.shape, torch.nan, dtype=machine.dtype, device=machine.there)
    last, work = case.num_layers - 1, case.work(ops.decode_attention, out)
    machine.run(work)
    for row in range(min(len(out), _CHECKED_ROWS)):
        k, v = case.row_kv(row, last, context)
        _check(f"decode of row {row}", out[row : row + 1], case.q[row : row + 1], k, v, context - 1)
    return machine.seconds(work) / case.num_layers


def _make_case(machine: Machine, lengths: list[tuple[int, int]], is_shared: bool = False) -> _Case:
    """Make random inputs of attention.

    lengths: (start, count) of each row.   is_shared: all rows have the first row's blocks.
    """
    shape = machine.shape
    longest = max(start + count for start, count in lengths)
    layers = _num_layers(machine, len(lengths) * longest * _token_bytes(machine))
    itemsize = machine.dtype.itemsize
    layout = Layout(replace(shape, num_layers=layers), itemsize, _BLOCK_SIZE, itemsize)
    per_row = layout.num_blocks(longest)
    num_slabs = len(lengths) * per_row
    slabs = torch.empty(num_slabs, layout.slab_bytes, dtype=torch.uint8, device=machine.there)
    kv = slabs.view(machine.dtype)[:, : layout.kv_block_elems].unflatten(1, layout.kv_shape)
    for layer in range(layers):
        part = kv[:, layer]
        part.copy_(machine.randn(*part.shape))
    blocks = deal_blocks(0, len(lengths), per_row)
    if is_shared:
        blocks = blocks[:1] * len(lengths)
    step = make_step(machine, make_form(machine, layout), slabs, make_rows(lengths, blocks))
    heads = shape.num_heads + 2 * shape.num_kv_heads
    q = machine.randn(sum(count for _, count in lengths), heads, shape.head_dim)
    return _Case(step, q[:, : shape.num_heads], kv, blocks)


def _token_bytes(machine: Machine) -> int:
    """Bytes of K and V of a token in one layer."""
    return 2 * machine.shape.num_kv_heads * machine.shape.head_dim * machine.dtype.itemsize


def _num_layers(machine: Machine, layer_bytes: int) -> int:
    """Return the number of layers in a slab: the model's, so that a row's blocks are as far apart
    as in an engine; more if a cache could hold those, fewer if they do not fit.
    """
    wanted = max(machine.shape.num_layers, machine.copies(layer_bytes))
    _, total = machine.memory_bytes
    return max(1, min(wanted, int(_KV_SHARE * total) // layer_bytes))


def _decode(machine: Machine, ceilings: Ceilings, batch: int, context: int) -> dict[str, Any]:
    case = _make_case(machine, [(context - 1, 1)] * batch)
    seconds = _checked_decode_s(machine, case, context)
    kv_bytes = batch * context * _token_bytes(machine)
    share = kv_bytes / ceilings.copied_per_s / seconds
    result: dict[str, Any] = {
        "us": rounded(1e6 * seconds),
        "kv_gb_per_s": rounded(kv_bytes / seconds / 1e9),
        "share_of_copy": rounded(share),
    }
    del case
    result["torch"] = _beside(machine, seconds, partial(_torch_decode, machine, batch, context))
    if batch * context >= machine.pick(goals.MANY_TOKENS, 0):
        result["goals"] = {"decode_attention": goals.at_least(share, goals.SHARE_OF_COPY)}
    return result


def _beside(
    machine: Machine, ours_s: float, make: Callable[[], tuple[Work, int]]
) -> dict[str, Any]:
    """Time torch's attention per layer beside ours.   make: makes torch's work and says how many
    layers it has.
    """

    def measure() -> dict[str, float]:
        work, num_layers = make()
        torchs_s = machine.seconds(work) / num_layers
        return {"us": rounded(1e6 * torchs_s), "to_ours": rounded(torchs_s / ours_s)}

    return attempt(measure)


def _torch_decode(machine: Machine, batch: int, context: int) -> tuple[Work, int]:
    """Return torch's flash attention on contiguous KV, and the number of its layers."""
    shape = machine.shape
    width = shape.num_kv_heads * context * shape.head_dim
    layers = machine.copies(2 * batch * width * machine.dtype.itemsize)
    kv = machine.randn(layers, 2, batch, shape.num_kv_heads, context, shape.head_dim)
    q = machine.randn(batch, shape.num_heads, 1, shape.head_dim)

    def run() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for k, v in kv:
                scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run, layers


def _prefill(machine: Machine, ceilings: Ceilings, tokens: int, context: int) -> dict[str, Any]:
    case = _make_case(machine, [(context, tokens)])
    out = torch.full(case.q.shape, torch.nan, dtype=machine.dtype, device=machine.there)
    machine.run(case.work(ops.prefill_attention, out))
    k, v = case.row_kv(0, case.num_layers - 1, context + tokens)
    for first in sorted({0, tokens // 2, max(0, tokens - _CHECKED_QUERIES)}):
        part = slice(first, first + _CHECKED_QUERIES)
        _check(f"prefill from {first}", out[part], case.q[part], k, v, context + first)
    seconds = machine.seconds(case.work(ops.prefill_attention, out)) / case.num_layers
    shape = machine.shape
    flops = goals.causal_flops(shape.num_heads, shape.head_dim, tokens, context)
    share = flops / seconds / ceilings.flops_per_s
    result: dict[str, Any] = {
        "us": rounded(1e6 * seconds),
        "tflops": rounded(flops / seconds / 1e12),
        "share_of_matmul": rounded(share),
        "torch": _beside(machine, seconds, lambda: (_torch_prefill(case.q, k, v), 1)),
    }
    if context + tokens >= machine.pick(goals.LONG_KEYS, 0):
        result["goals"] = {"prefill_attention": goals.at_least(share, goals.SHARE_OF_MATMUL)}
    return result


def _torch_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Work:
    """Return torch's flash attention, on contiguous K and V, repeated for heads that share them."""
    group = q.shape[1] // k.shape[0]
    q = q.transpose(0, 1).contiguous()[None]
    k, v = (x.repeat_interleave(group, dim=0).contiguous()[None] for x in (k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])

    def run() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return run


def _check(
    what: str, ours: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int
) -> None:
    """Check our attention against torch's.   ours, q: [n, heads, head_dim], at positions start,
    start + 1, ...   k, v: [kv heads, keys, head_dim].
    """
    torchs = _attend(q, k, v, start)
    exact = _attend(q.float(), k.float(), v.float(), start)
    check_close(what, ours, torchs, exact)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5
    last = start + torch.arange(len(q), device=q.device)
    unseen = torch.arange(k.shape[1], device=q.device) > last[:, None]
    return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
