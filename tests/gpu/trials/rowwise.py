"""Kernels that take each token by itself: embedding, norms, activation, quantisation, slabs."""

from collections.abc import Iterator

import torch
from torch.nn.functional import silu

from kernels import reference
from kernels.reference import FP8
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Trial, near, on, randint, randn, same

EPS = 1e-5
_SLAB_BYTES = 3 * 32768 + 16  # slightly more than three pieces


def rowwise_trials(setting: Setting) -> Iterator[Trial]:
    yield _embed(setting)
    for dtype in setting.dtypes:
        yield _rms_norm(setting, dtype)
    yield _add_rms_norm(setting)
    yield _silu_mul(setting)
    if setting.has_fp8:
        yield _quantize_fp8(setting)
    for source, target in ((False, False), (True, False), (False, True)):
        yield _copy_slabs(setting, source, target)


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

    def run(ops, there):
        return [ops.embed(*on(there, table, ids, sources, previous))]

    return Trial("embed", run, same)


def _rms_norm(setting: Setting, dtype: torch.dtype) -> Trial:
    sizes, rng = setting.kernels, setting.rng(f"rms_norm {dtype}")
    x = randn(sizes.tokens, sizes.hidden, rng=rng, dtype=dtype)
    weight = randn(sizes.hidden, rng=rng, dtype=dtype)

    def run(ops, there):
        return [ops.rms_norm(*on(there, x, weight), EPS)]

    return Trial(f"rms_norm {dtype}", run, near(lambda: [exact_norm(x, weight)]))


def _add_rms_norm(setting: Setting) -> Trial:
    sizes, rng = setting.kernels, setting.rng("add_rms_norm")
    residual, x = randn(2, sizes.tokens, sizes.hidden, rng=rng, dtype=setting.dtype)
    weight = randn(sizes.hidden, rng=rng, dtype=setting.dtype)
    flags = torch.ones(sizes.tokens, dtype=torch.int32)
    spoilt = x.clone()
    spoilt[1, 3], spoilt[2, -1] = torch.nan, torch.inf

    def run(ops, there):
        total, added, bad, factor, finite = on(there, residual, x, spoilt, weight, flags)
        norm = ops.add_rms_norm(total, added, factor, EPS)
        ops.add_rms_norm(total.clone(), bad, factor, EPS, finite)
        return [total, norm, finite]

    def exact():
        total = residual.double() + x.double()
        return [total, exact_norm(total, weight), flags]

    return Trial("add_rms_norm", run, near(exact))


def _silu_mul(setting: Setting) -> Trial:
    sizes, rng = setting.kernels, setting.rng("silu_mul")
    gate_up = randn(sizes.tokens, 2 * sizes.intermediate, rng=rng, dtype=setting.dtype)

    def run(ops, there):
        return [ops.silu_mul(*on(there, gate_up))]

    def exact():
        gate, up = gate_up.double().chunk(2, dim=-1)
        return [silu(gate) * up]

    return Trial("silu_mul", run, near(exact))


def _quantize_fp8(setting: Setting) -> Trial:
    sizes, rng = setting.kernels, setting.rng("quantize_fp8")
    x = randn(sizes.tokens, sizes.hidden, rng=rng, dtype=setting.dtype)
    x[1] = 0
    _, scales = reference.quantize_fp8(x)

    def run(ops, there):
        values, found = ops.quantize_fp8(*on(there, x))
        assert values.dtype == FP8
        return [values, found]

    return Trial("quantize_fp8", run, near(lambda: [x.double() / scales.double(), scales]))


def _copy_slabs(setting: Setting, source_is_host: bool, target_is_host: bool) -> Trial:
    places = ["device", "host"]
    name = f"copy_slabs from {places[source_is_host]} to {places[target_is_host]}"
    rng = setting.rng(name)
    memory = torch.randint(256, (2, 7, _SLAB_BYTES), generator=rng).to(torch.uint8)
    target_ids, source_ids = torch.randperm(7, generator=rng)[:4], randint(0, 7, 4, rng=rng)

    def run(ops, there):
        target, source = (
            setting.device.pinned(*part.shape, dtype=part.dtype).copy_(part)
            if is_host
            else part.to(there, copy=True)
            for part, is_host in zip(memory, (target_is_host, source_is_host), strict=True)
        )
        ids = on(there, target_ids.int(), source_ids)
        ops.copy_slabs(target, ids[0], source, ids[1])
        setting.finish()
        return [target]

    return Trial(name, run, same)
