"""Mixtures of experts: the router, the products of tiles of 16, 64 and 128 rows, and the sum."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels import reference
from kernels.packed import pack
from kernels.quantized import Fp8Weight, Rounding
from kernels.routing import Routing, choose_experts, group_by_expert
from kernels.stacked import DeviceWeight, ExpertStack
from tests.gpu.setting import Setting
from tests.gpu.trials.trial import Outputs, Trial, apart, near, on, randint, randn, work_on
from tests.kernels.quantized_cases import random_weight

DENSE, FP8 = "dense", "fp8"
INT4 = Rounding(4, 32)
Form = Rounding | str

_FORMS: tuple[Form, ...] = (DENSE, FP8, INT4, Rounding(4, 128, has_zeros=True), Rounding(8))
_CHOICES = (
    (7, 8, 2, True), (90, 4, 1, False), (270, 2, 2, True), (37, 160, 2, False), (1, 5, 5, True),
)  # fmt: skip
"""(tokens, experts, experts of a token, whether their weights sum to 1), for which the router makes
tiles of all sizes.
"""
_TOKENS, _EXPERTS = 90, 5


@dataclass(frozen=True)
class Mixture:
    """Weights of a layer of experts."""

    router: torch.Tensor
    gate_up: ExpertStack
    down: ExpertStack

    def on(self, there: torch.device) -> "Mixture":
        gate_up, down = (work_on(there, stack) for stack in (self.gate_up, self.down))
        return Mixture(self.router.to(there), gate_up, down)


def expert_trials(setting: Setting) -> Iterator[Trial]:
    for choice in _CHOICES:
        yield _route(setting, *choice, setting.dtype)
    for form in _FORMS:
        if form != FP8 or setting.has_fp8:
            for tile_rows in (16, 64, 128):
                yield _products(setting, form, tile_rows, 2, setting.dtype)
    yield _bad_rows(setting)
    for dtype in setting.dtypes[1:]:
        yield _route(setting, *_CHOICES[0], dtype)
        yield _products(setting, DENSE, 16, 1, dtype)


def make_mixture(setting: Setting, form: Form, num_experts: int, dtype: torch.dtype) -> Mixture:
    """Random experts of about the setting's hidden size; narrow ones, as the reference is slow."""
    hidden, width = setting.kernels.hidden, setting.kernels.intermediate // 16
    if isinstance(form, Rounding):
        group = form.group_size or 1
        hidden, width = hidden - hidden % group, width + -width % group
    rng = setting.rng(f"mixture {form} {num_experts}")

    def stack(out: int, inputs: int) -> ExpertStack:
        weights = [_weight(form, out, inputs, dtype, rng) for _ in range(num_experts)]
        found = ExpertStack.empty(weights[0], num_experts)
        for expert, weight in enumerate(weights):
            found.put(expert, weight)
        return found

    router = (randn(num_experts, hidden, rng=rng) / hidden**0.5).to(dtype)
    return Mixture(router, stack(2 * width, hidden), stack(hidden, width))


def _weight(
    form: Form, out: int, inputs: int, dtype: torch.dtype, rng: torch.Generator
) -> DeviceWeight:
    if isinstance(form, Rounding):
        return pack(random_weight(form, out, inputs, seed=int(randint(0, 1 << 30, 1, rng=rng))))
    weight = randn(out, inputs, rng=rng) / inputs**0.5
    return Fp8Weight(*reference.quantize_fp8(weight)) if form == FP8 else weight.to(dtype)


def _route(
    setting: Setting, tokens: int, experts: int, per_token: int, norms: bool, dtype: torch.dtype
) -> Trial:
    """The router on numbers whose sums are exact and differ: all choose the same experts."""
    name = f"route {tokens} tokens to {per_token} of {experts} experts, {dtype}"
    rng, hidden = setting.rng(name), setting.kernels.hidden
    x = randint(-2, 3, tokens, hidden, rng=rng).to(dtype) / 32
    router = randint(-2, 3, experts, hidden, rng=rng).to(dtype)
    x[:, -1], router[:, -1] = 1, torch.randperm(experts, generator=rng) / 8192

    def run(ops, there):
        routing = ops.route(*apart(there, x), *on(there, router), per_token, norms)
        return [routing.weights, routing.pairs, expert_of_places(routing)]

    def exact():
        logits = x.double() @ router.double().T
        chosen, _ = choose_experts(logits, per_token, norms_weights=norms)
        weights = logits.softmax(dim=1).gather(1, chosen)
        if norms:
            weights /= weights.sum(dim=1, keepdim=True)
        flat = chosen.flatten()
        return [weights, flat.argsort(stable=True).int(), flat.sort().values.int()]

    return Trial(name, run, near(exact))


def expert_of_places(routing: Routing) -> torch.Tensor:
    """The expert of each place in the routing's pairs, by its tiles, [pairs] int32; -1 without, -2
    in a tile that has too many places or one of another tile. Any numbers may be in the tiles.
    """
    found = torch.full_like(routing.pairs, -1)
    for expert, first, count in routing.tiles.T.tolist():
        places = found[first : first + count]
        is_right = count <= routing.tile_rows and bool((places == -1).all())
        places.fill_(expert if is_right else -2)
    return found


def _products(
    setting: Setting, form: Form, tile_rows: int, per_token: int, dtype: torch.dtype
) -> Trial:
    name = f"{form} experts, {per_token} of a token, tiles of {tile_rows} rows, {dtype}"
    rng = setting.rng(name)
    mixture = make_mixture(setting, form, _EXPERTS, dtype)
    routing = _skewed(rng, per_token, tile_rows)
    inputs = [
        randn(count, width, rng=rng, dtype=dtype)
        for count, width in (
            (_TOKENS, mixture.gate_up.in_features),
            (_TOKENS * per_token, mixture.down.in_features),
            (_TOKENS * per_token, mixture.down.out_features),
        )
    ]

    def run(ops, there):
        own, known = mixture.on(there), work_on(there, routing)
        (x, grouped), (outputs,) = apart(there, *inputs[:2]), on(there, inputs[2])
        return [
            ops.multiply_experts(x, own.gate_up, known),
            ops.multiply_experts(grouped, own.down, known, True),
            ops.sum_experts(outputs, known),
        ]

    def exact():
        x, grouped, outputs = (part.double() for part in inputs)
        pairs, experts = routing.pairs.long(), expert_of_places(routing).tolist()
        gate_up, down = (
            [stack.dequantize(expert).double() for expert in range(_EXPERTS)]
            for stack in (mixture.gate_up, mixture.down)
        )
        tokens = zip(pairs // per_token, experts, strict=True)
        weights = routing.weights.double().flatten()[:, None]
        return [
            torch.stack([gate_up[expert] @ x[token] for token, expert in tokens]),
            torch.stack([down[experts[place]] @ grouped[place] for place in pairs.argsort()]),
            (outputs * weights).unflatten(0, (_TOKENS, per_token)).sum(dim=1),
        ]

    return Trial(name, run, near(exact))


def _bad_rows(setting: Setting) -> Trial:
    """Rows that are not finite have experts, and spoil no others."""
    name, tokens, bad = "experts of bad rows", 19, [1, 17, 18]
    good = [token for token in range(tokens) if token not in bad]
    mixture = make_mixture(setting, DENSE, 8, setting.dtype)
    mixture.router[:, 3] = -1.0  # so that infinity makes all experts equally bad
    x = randn(tokens, mixture.gate_up.in_features, rng=setting.rng(name), dtype=setting.dtype)
    spoilt = x.clone()
    spoilt[1], spoilt[17, 3], spoilt[18, 5] = torch.nan, torch.inf, torch.nan

    def run(ops, there):
        own, outputs = mixture.on(there), []
        for part in on(there, x, spoilt):
            routing = ops.route(part, own.router, 2, True)
            gated = ops.gated(ops.multiply_experts(part, own.gate_up, routing), "silu")
            grouped = ops.multiply_experts(gated, own.down, routing, True)
            outputs += [routing.pairs, ops.sum_experts(grouped, routing)]
        return outputs

    def judge(*both: Outputs) -> None:
        for pairs, clean, bad_pairs, found in both:
            for own in (pairs, bad_pairs):
                assert own.sort().values.tolist() == list(range(2 * tokens))
            assert not found[bad].isfinite().any()
            torch.testing.assert_close(found[good], clean[good])

    return Trial(name, run, judge)


def _skewed(rng: torch.Generator, per_token: int, tile_rows: int) -> Routing:
    """A choice in which one expert has most tokens, and another one has none."""
    logits = randn(_TOKENS, _EXPERTS, rng=rng) - 2 * torch.arange(_EXPERTS)
    logits[:, 1], logits[0, -1] = -torch.inf, 10.0  # the last one has a token, too
    chosen, weights = choose_experts(logits, per_token, norms_weights=True)
    return group_by_expert(chosen, weights, _EXPERTS, tile_rows)
