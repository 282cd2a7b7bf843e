"""Kernels that take each token by itself: embedding, norms, activation, quantisation, slabs."""

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import gelu, silu

from kernels import reference
from kernels.elementwise import Activation
from kernels.reference import FP8
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Outputs, Trial, apart, near, on, randint, randn, same

EPS = 1e-5
GATES: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
}
_TOO_WIDE = 20_001
"""Width of a row that is quantised in several tiles."""
_PIECE = 32768
_SLAB_BYTES = (16, _PIECE, 3 * _PIECE + 16)


def rowwise_trials(setting: Setting) -> Iterator[Trial]:
    yield _embed(setting)
    for dtype in setting.dtypes:
        yield _rms_norm(setting, dtype, dtype)
    yield _rms_norm(setting, setting.dtype, torch.float32)
    yield _add_rms_norm(setting)
    yield _flags(setting)
    for name in GATES:
        yield _gated(setting, name)
    yield _far_gates(setting)
    if setting.has_fp8:
        for width in (setting.kernels.hidden, _TOO_WIDE):
            yield _quantize_fp8(setting, width)
    for source, target in ((False, False), (True, False), (False, True)):
        yield _copy_slabs(setting, _SLAB_BYTES[-1], source, target)
    for slab_bytes in _SLAB_BYTES[:-1] if setting.is_dry else ():
        yield _copy_slabs(setting, slab_bytes, False, False)
    yield _copy_within(setting)


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float64."""
    wide = x.double()
    return weight.double() * wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()


def _embed(setting: Setting) -> Trial:
    sizes, rng = setting.kernels, setting.rng("embed")
    table = randn(1000, sizes.hidden, rng=rng, dtype=setting.dtype)
    ids = randint(-2, 1000, sizes.tokens, rng=rng)
    sources = randint(-2, 16, sizes.tokens, rng=rng)
    previous = randint(-1, 1000, 16, rng=rng)
    # The last entry, the first place and a token of a row that failed.
    ids[0], sources[0], sources[1], sources[2], previous[0], previous[1] = 999, -1, 0, 1, 998, -1

    def run(ops, there):
        return [ops.embed(*apart(there, table), *on(there, ids, sources, previous))]

    return Trial("embed", run, same)


def _rms_norm(setting: Setting, dtype: torch.dtype, weight_dtype: torch.dtype) -> Trial:
    title = f"rms_norm {dtype}, weights {weight_dtype}"
    sizes, rng = setting.kernels, setting.rng(title)
    x = randn(sizes.tokens, sizes.hidden, rng=rng, dtype=dtype)
    x[1] = 0
    x[2] /= 300  # EPS is a part of its mean square
    weight = randn(sizes.hidden, rng=rng, dtype=weight_dtype)

    def run(ops, there):
        return [ops.rms_norm(*apart(there, x), *on(there, weight), EPS)]

    is_near = near(lambda: [exact_norm(x, weight)])

    def judge(ours: Outputs, torchs: Outputs) -> None:
        is_near(ours, torchs)
        # If the quotient were not rounded before the weight is applied, 14 % would differ.
        if dtype == weight_dtype != torch.float32:
            assert (ours[0] != torchs[0]).float().mean() < 0.02, "it is rounded elsewhere"

    return Trial(title, run, judge)


def _add_rms_norm(setting: Setting) -> Trial:
    sizes, rng = setting.kernels, setting.rng("add_rms_norm")
    residual, x = randn(2, sizes.tokens, sizes.hidden, rng=rng, dtype=setting.dtype)
    weight = randn(sizes.hidden, rng=rng, dtype=setting.dtype)

    def run(ops, there):
        total, added = apart(there, residual, x)
        norm = ops.add_rms_norm(total, added, *on(there, weight), EPS)
        return [total, norm]

    def exact():
        total = residual.double() + x.double()
        return [total, exact_norm(total, weight)]

    return Trial("add_rms_norm", run, near(exact))


def _flags(setting: Setting) -> Trial:
    """Flags of sums that are not finite; some are 0 before, and none of the others change."""
    sizes, rng, dtype = setting.kernels, setting.rng("flags"), setting.dtype
    residual, x = randn(2, 7, sizes.hidden, rng=rng, dtype=dtype)
    x[1, 3 % sizes.hidden], x[2, -1], x[3, 0] = torch.nan, torch.inf, -torch.inf
    residual[4, -1] = x[4, -1] = torch.finfo(dtype).max  # their sum overflows
    before = torch.tensor([1, 1, 1, 1, 1, 0, 7], dtype=torch.int32)
    weight = randn(sizes.hidden, rng=rng, dtype=dtype)

    def run(ops, there):
        (finite,) = on(there, before)
        ops.add_rms_norm(*apart(there, residual, x), *on(there, weight), EPS, finite)
        return [finite]

    def judge(ours: Outputs, _: Outputs) -> None:
        assert ours[0].tolist() == [1, 0, 0, 0, 0, 0, 7]

    return Trial("add_rms_norm, flags", run, judge)


def _gated(setting: Setting, name: Activation) -> Trial:
    sizes, rng = setting.kernels, setting.rng(name)
    gate_up = 3 * randn(sizes.tokens, 2 * sizes.intermediate, rng=rng, dtype=setting.dtype)

    def run(ops, there):
        return [ops.gated(*apart(there, gate_up), name)]

    def exact():
        gate, up = gate_up.double().chunk(2, dim=-1)
        return [GATES[name](gate) * up]

    return Trial(name, run, near(exact))


def _far_gates(setting: Setting) -> Trial:
    """Gates so far from 0 that their exponentials overflow."""
    gates = torch.tensor([[-3e4, -100.0, 100.0, 3e4, 1.0, 1.0, 1.0, 1.0]], dtype=setting.dtype)

    def run(ops, there):
        return [ops.gated(*on(there, gates), name) for name in GATES]

    def exact():
        gate, up = gates.double().chunk(2, dim=-1)
        return [activation(gate) * up for activation in GATES.values()]

    return Trial("gates far from 0", run, near(exact))


def _quantize_fp8(setting: Setting, width: int) -> Trial:
    """Rows of all sizes, one of zeros, two that are not finite, which no other row notices."""
    rng = setting.rng(f"quantize_fp8 {width}")
    x = randn(7, width, rng=rng) * torch.logspace(-6, 3, 7)[:, None]
    x[1], x[3, width // 2], x[5, -1] = 0, torch.nan, -torch.inf
    good = [0, 1, 2, 4, 6]
    x = x.to(setting.dtype)
    _, scales = reference.quantize_fp8(x[good])

    def run(ops, there):
        values, found = ops.quantize_fp8(*apart(there, x))
        assert values.dtype == FP8
        # In the interpreter NaN is lost where it becomes e4m3.
        return [values[good], found[good]]

    def exact():
        return [x[good].double() / scales.double(), scales]

    return Trial(f"quantize_fp8, {width} columns", run, near(exact))


def _copy_slabs(
    setting: Setting, slab_bytes: int, source_is_host: bool, target_is_host: bool
) -> Trial:
    """Copies of the middles of slabs, whose rests stay as they are."""
    places = ["device", "host"]
    name = f"copy_slabs of {slab_bytes} from {places[source_is_host]} to {places[target_is_host]}"
    rng = setting.rng(name)
    words = randint(-(2**31), 2**31, 2, 7, slab_bytes // 4, rng=rng)
    target_ids, source_ids = torch.randperm(7, generator=rng)[:4].int(), randint(0, 7, 4, rng=rng)
    target_ids[target_ids == 6] = target_ids[0].item()  # no slab is the target of two copies
    target_ids[0] = source_ids[1] = 6  # the last one, which may lie far away

    def run(ops, there):
        target, source = (
            setting.device.pinned(*part.shape, dtype=part.dtype).copy_(part)
            if is_host
            else apart(there, part)[0]
            for part, is_host in zip(words, (target_is_host, source_is_host), strict=True)
        )
        ids = on(there, target_ids, source_ids)
        ops.copy_slabs(target.view(torch.uint8), ids[0], source.view(torch.uint8), ids[1])
        setting.finish()
        return [target]

    return Trial(name, run, same)


def _copy_within(setting: Setting) -> Trial:
    words = randint(-(2**31), 2**31, 6, 12, rng=setting.rng("copy_slabs within"))
    ids = torch.tensor([[5, 0], [1, 3]], dtype=torch.int32)

    def run(ops, there):
        arena, (to, start) = apart(there, words)[0].view(torch.uint8), on(there, *ids)
        ops.copy_slabs(arena, to, arena, start)
        return [arena]

    return Trial("copy_slabs within an arena", run, same)
