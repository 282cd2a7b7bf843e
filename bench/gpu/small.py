"""Small kernels, measured by bytes: each runs on inputs that together are larger than any cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from bench.gpu import goals
from bench.gpu.ceilings import Ceilings
from bench.gpu.check import check_close, check_equal, note_wrong
from bench.gpu.machine import Machine
from bench.gpu.rows import Row
from bench.report import rounded
from kernels import reference
from kernels.gpu import ops
from kernels.packed import pack
from kernels.quantized import Rounding, quantize
from kernels.routing import choose_experts
from kernels.stacked import ExpertStack
from kernels.work import SamplingWork

_EPS = 1e-5
_BLOCK_SIZE = 16
_CHECKED_ROWS = 64
_MOSTLY = 0.95
"""Least share of drawn tokens, and of rounded values, that must equal torch's: for a few of them
the last bits of sums and quotients decide.
"""


@dataclass(frozen=True)
class _Case:
    """One small kernel to measure.

    calls: the same kernel on different inputs.   size_bytes: bytes that a call reads and writes.

    check: checks the kernel's result.
    """

    calls: Sequence[Callable[[], object]]
    size_bytes: int
    check: Callable[[], None]


def rows(machine: Machine, ceilings: Ceilings) -> Iterator[Row]:
    for name, make in _CASES.items():
        for tokens in machine.pick((64, 256, 2048), (5,)):
            measure = partial(_measure, machine, ceilings, make, tokens)
            yield Row("gpu.small", {"kernel": name, "tokens": tokens}, measure)


def _measure(
    machine: Machine, ceilings: Ceilings, make: Callable[[Machine, int], _Case], tokens: int
) -> dict[str, Any]:
    case = make(machine, tokens)
    case.check()
    seconds = machine.seconds(lambda: [call() for call in case.calls]) / len(case.calls)
    floor_s = goals.floor_s(case.size_bytes, ceilings.copied_per_s)
    return {
        "us": rounded(1e6 * seconds),
        "gb_per_s": rounded(case.size_bytes / seconds / 1e9),
        "share_of_copy": rounded(floor_s / seconds),
    }


def _inputs(machine: Machine, size_bytes: int) -> range:
    return range(machine.copies(size_bytes))


def _add_rms_norm(machine: Machine, tokens: int) -> _Case:
    hidden = machine.shape.hidden_size
    size = 4 * tokens * hidden * machine.dtype.itemsize
    weight = machine.randn(hidden)
    pairs = [
        (machine.randn(tokens, hidden), machine.randn(tokens, hidden))
        for _ in _inputs(machine, size)
    ]

    def check() -> None:
        residual, x = (tensor.clone() for tensor in pairs[0])
        exact = reference.add_rms_norm(residual.float(), x.float(), weight.float(), _EPS)
        torchs = reference.add_rms_norm(residual.clone(), x, weight, _EPS)
        ours = machine.run(partial(ops.add_rms_norm, residual, x, weight, _EPS))
        check_close("add_rms_norm", ours, torchs, exact)

    calls = [partial(ops.add_rms_norm, *pair, weight, _EPS) for pair in pairs]
    return _Case(calls, size, check)


def _rope_store_kv(machine: Machine, tokens: int) -> _Case:
    shape, blocks = machine.shape, -(-tokens // _BLOCK_SIZE)
    q_width, kv_width = (n * shape.head_dim for n in (shape.num_heads, 2 * shape.num_kv_heads))
    size = 2 * tokens * (q_width + kv_width) * machine.dtype.itemsize
    half = torch.rand(tokens, shape.head_dim // 2, device=machine.there)
    cos, sin = half.cos(), half.sin()
    positions = torch.arange(tokens, dtype=torch.int32, device=machine.there)
    finite = torch.ones_like(positions)

    def work(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        qkv = machine.randn(tokens, q_width + kv_width, dtype=dtype)
        places = blocks, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim
        kv = torch.full(places, torch.nan, dtype=dtype, device=machine.there)
        return qkv, kv, cos, sin, positions, positions, finite

    inputs = [work(machine.dtype) for _ in _inputs(machine, size)]

    def check() -> None:
        qkv, kv, *rest = inputs[0]
        exact, torchs, ours = (
            (qkv.clone().to(dtype), kv.to(dtype, copy=True))
            for dtype in (torch.float32, machine.dtype, machine.dtype)
        )
        reference.rope_store_kv(*exact, *rest)
        reference.rope_store_kv(*torchs, *rest)
        machine.run(partial(ops.rope_store_kv, *ours, *rest))
        check_close("q", *(pair[0][:, :q_width] for pair in (ours, torchs, exact)))
        written = ~exact[1].isnan()
        check_equal("places of KV", ~ours[1].isnan(), written)
        check_close("KV", *(pair[1][written] for pair in (ours, torchs, exact)))

    return _Case([partial(ops.rope_store_kv, *given) for given in inputs], size, check)


def _silu_mul(machine: Machine, tokens: int) -> _Case:
    width = machine.shape.intermediate_size
    size = 3 * tokens * width * machine.dtype.itemsize
    inputs = [machine.randn(tokens, 2 * width) for _ in _inputs(machine, size)]

    def check() -> None:
        ours = machine.run(partial(ops.silu_mul, inputs[0]))
        exact = reference.silu_mul(inputs[0].float())
        check_close("silu_mul", ours, reference.silu_mul(inputs[0]), exact)

    return _Case([partial(ops.silu_mul, x) for x in inputs], size, check)


def _embed(machine: Machine, tokens: int) -> _Case:
    hidden = machine.shape.hidden_size
    size = 2 * tokens * hidden * machine.dtype.itemsize
    table = machine.randn(machine.vocab_size, hidden)
    previous = machine.ints(tokens, below=machine.vocab_size)
    sources = machine.ints(tokens, below=2) * (machine.ints(tokens, below=tokens) + 1) - 1
    inputs = [machine.ints(tokens, below=machine.vocab_size) for _ in _inputs(machine, size)]

    def check() -> None:
        given = table, inputs[0], sources, previous
        check_equal("embed", machine.run(partial(ops.embed, *given)), reference.embed(*given))

    return _Case([partial(ops.embed, table, ids, sources, previous) for ids in inputs], size, check)


def _quantize_fp8(machine: Machine, tokens: int) -> _Case:
    hidden = machine.shape.hidden_size
    size = tokens * hidden * (machine.dtype.itemsize + 1)
    inputs = [machine.randn(tokens, hidden) for _ in _inputs(machine, size)]

    def check() -> None:
        ours, scale = machine.run(partial(ops.quantize_fp8, inputs[0]))
        torchs, torch_scale = reference.quantize_fp8(inputs[0])
        largest = inputs[0].double().abs().amax(dim=-1, keepdim=True)
        check_close("e4m3 scales", scale, torch_scale, largest / reference.FP8_MAX)
        # Triton's interpreter rounds wrongly where rounding carries to a power of two.
        kept = torchs.float().frexp().mantissa.abs() != 0.5
        _check_mostly("e4m3 values", ours.float()[kept], torchs.float()[kept])

    return _Case([partial(ops.quantize_fp8, x) for x in inputs], size, check)


def _product(rounding: Rounding | None, machine: Machine, tokens: int) -> _Case:
    """A layer's o projection: dense, by torch, or quantised."""
    hidden = machine.shape.hidden_size
    x = machine.randn(tokens, hidden)
    dense = machine.randn(hidden, hidden, std=hidden**-0.5)
    if rounding is None:
        size = dense.nbytes + 2 * x.nbytes
        copies = [dense.clone() for _ in _inputs(machine, size)]
        return _Case([partial(linear, x, weight) for weight in copies], size, lambda: None)
    weight = quantize(dense, rounding)
    packed = pack(weight)
    size = packed.nbytes + 2 * x.nbytes
    packs = [replace(packed, codes=packed.codes.clone()) for _ in _inputs(machine, size)]

    def check() -> None:
        ours = machine.run(partial(ops.multiply_quantized, x, packed))
        meant = weight.dequantize()
        torchs = linear(x, meant.to(x.dtype))
        check_close("multiply_quantized", ours, torchs, x.double() @ meant.double().T)

    return _Case([partial(ops.multiply_quantized, x, own) for own in packs], size, check)


def _fp8_product(by_inputs: bool, is_fast: bool, machine: Machine, tokens: int) -> _Case:
    """The product of o or down in FP8, by torch.   is_fast: sums stay in the tensor cores."""
    hidden = machine.shape.hidden_size
    width = machine.shape.intermediate_size if by_inputs else hidden
    values, scale = reference.quantize_fp8(machine.randn(tokens, width))
    codes, scales = reference.quantize_fp8(machine.randn(hidden, width, std=width**-0.5))
    row = scales.T.contiguous()
    size = codes.nbytes + values.nbytes + tokens * hidden * machine.dtype.itemsize
    copies = [codes.clone() for _ in _inputs(machine, size)]

    def multiply(own: torch.Tensor, use_fast_accum: bool = is_fast) -> torch.Tensor:
        return torch._scaled_mm(
            values,
            own.T,
            scale_a=scale,
            scale_b=row,
            out_dtype=machine.dtype,
            use_fast_accum=use_fast_accum,
        )

    def check() -> None:
        exact = (values.double() * scale) @ (codes.double() * scales).T
        check_close("product in FP8", multiply(codes), multiply(codes, False), exact)

    return _Case([partial(multiply, own) for own in copies], size, check)


def _experts(rounding: Rounding | None, machine: Machine, tokens: int) -> _Case:
    """A layer's experts with their router, on the sizes of Qwen3-30B-A3B: five kernels and the
    activation. Bytes are those of the experts that the tokens choose, and what lies in between.
    """
    hidden, width, count, each = machine.pick((2048, 768, 128, 8), (64, 32, 4, 2))
    x = machine.randn(tokens, hidden)
    router = machine.randn(count, hidden, std=hidden**-0.5)

    def stack(outputs: int, inputs: int) -> ExpertStack:
        dense = [machine.randn(outputs, inputs, std=inputs**-0.5) for _ in range(count)]
        weights = [pack(quantize(w, rounding)) if rounding else w for w in dense]
        found = ExpertStack.empty(weights[0], count)
        for expert, weight in enumerate(weights):
            found.put(expert, weight)
        return found

    gate_up, down = stack(2 * width, hidden), stack(hidden, width)

    def run(kernels: Any, x: torch.Tensor, gate_up: ExpertStack = gate_up) -> torch.Tensor:
        routing = kernels.route(x, router, each, True)
        gated = kernels.silu_mul(kernels.multiply_experts(x, gate_up, routing))
        summed: torch.Tensor = kernels.sum_experts(
            kernels.multiply_experts(gated, down, routing, True), routing
        )
        return summed

    def check() -> None:
        some = x[:_CHECKED_ROWS]
        ours = machine.run(partial(run, ops, some))
        check_close("experts", ours, run(reference, some), run(reference, some.float()))

    logits = linear(x.float(), router.float())
    chosen, _ = choose_experts(logits, each, norms_weights=True)
    of_expert = (gate_up.nbytes + down.nbytes) // count
    between = tokens * each * (6 * width + 2 * hidden) * x.element_size()
    size = len(chosen.unique()) * of_expert + between + 2 * x.nbytes
    stacks = [replace(gate_up, codes=gate_up.codes.clone()) for _ in _inputs(machine, size)]
    return _Case([partial(run, ops, x, own) for own in stacks], size, check)


def _sample(top_p: float, temperature: float, machine: Machine, tokens: int) -> _Case:
    size = tokens * machine.vocab_size * 4
    inputs = [
        machine.randn(tokens, machine.vocab_size, dtype=torch.float32)
        for _ in _inputs(machine, size)
    ]

    def work(rows: int) -> SamplingWork:
        def same(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=machine.there)

        return SamplingWork(
            temperature=same(temperature, torch.float32),
            min_p=same(0.0, torch.float64),
            top_p=same(top_p, torch.float64),
            top_k=same(0, torch.int32),
            uniform=torch.linspace(0, 0.999, rows, dtype=torch.float64, device=machine.there),
        )

    def check() -> None:
        some = inputs[0][:_CHECKED_ROWS]
        ours = machine.run(partial(ops.sample, some, work(len(some))))
        torchs = reference.sample(some, work(len(some)))
        (check_equal if temperature == 0 else _check_mostly)("sampled tokens", ours, torchs)

    whole = work(tokens)
    return _Case([partial(ops.sample, logits, whole) for logits in inputs], size, check)


def _check_mostly(what: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    equal = float((ours == expected).float().mean())
    if not equal >= _MOSTLY:
        note_wrong(f"{what}: {equal:.1%} are torch's")


_CASES: dict[str, Callable[[Machine, int], _Case]] = {
    "add_rms_norm": _add_rms_norm,
    "rope_store_kv": _rope_store_kv,
    "silu_mul": _silu_mul,
    "embed": _embed,
    "quantize_fp8": _quantize_fp8,
    "o dense, by torch": partial(_product, None),
    "o in 4 bits": partial(_product, Rounding(4, 32)),
    "o in 8 bits": partial(_product, Rounding(8)),
    "o in FP8": partial(_fp8_product, False, False),
    "o in FP8, fast sums": partial(_fp8_product, False, True),
    "down in FP8": partial(_fp8_product, True, False),
    "down in FP8, fast sums": partial(_fp8_product, True, True),
    "experts dense": partial(_experts, None),
    "experts in 4 bits": partial(_experts, Rounding(4, 32)),
    "sample greedy": partial(_sample, 1.0, 0.0),
    "sample top_p 0.9": partial(_sample, 0.9, 1.0),
}
