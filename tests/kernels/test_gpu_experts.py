"""Experts: the trials of the GPU in the interpreter, rows that are alone, and rows that are bad."""

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.gpu import ops
from kernels.routing import choose_experts, group_by_expert
from tests.gpu.invariance import invariance_checks
from tests.gpu.setting import dry
from tests.gpu.trials.experts import DENSE, expert_of_places, expert_trials, make_mixture
from tests.gpu.trials.trial import CPU

SETTING = dry(1)
TRIALS = {trial.name: trial for trial in expert_trials(SETTING)}
INVARIANCE = {n: check for n, check in invariance_checks().items() if "experts" in n}


@pytest.fixture(autouse=True)
def empty_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_kernels_give_what_the_references_give(trial):
    trial.judge(trial.run(ops, CPU), trial.run(reference, CPU))


@pytest.mark.parametrize("number", [-(2**31), 0, 1, 2**31 - 1])
def test_tiles_of_any_numbers_are_wrong_and_no_error(number):
    """Kernels are compiled in advance without being run: tiles then hold what memory held."""
    logits = torch.randn(19, 8, generator=SETTING.rng("tiles"))
    routing = group_by_expert(*choose_experts(logits, 2, norms_weights=True), 8, 16)
    assert expert_of_places(routing).min() >= 0
    garbage = replace(routing, tiles=torch.full_like(routing.tiles, number))
    assert expert_of_places(garbage).min() < 0


@pytest.mark.parametrize("check", INVARIANCE.values(), ids=INVARIANCE)
def test_a_row_has_the_same_bits_whoever_is_beside_it(check):
    check(SETTING)


# The interpreter computes with numpy, which warns about NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.parametrize("kernels", [ops, reference])
def test_a_bad_row_has_experts_and_spoils_no_other(kernels):
    mixture = make_mixture(SETTING, DENSE, 8, torch.float32)
    x = torch.randn(19, mixture.gate_up.in_features, generator=SETTING.rng("bad rows"))
    mixture.router[:, 3] = -1.0  # so that infinity makes all experts equally bad

    def run():
        routing = kernels.route(x, mixture.router, 3, True)
        assert sorted(routing.pairs.tolist()) == list(range(3 * 19))
        gated = kernels.silu_mul(kernels.multiply_experts(x, mixture.gate_up, routing))
        outputs = kernels.multiply_experts(gated, mixture.down, routing, True)
        return kernels.sum_experts(outputs, routing)

    clean = run()
    x[1], x[17, 3], x[18, 5] = torch.nan, torch.inf, torch.nan
    found, bad = run(), [1, 17, 18]
    assert not found[bad].isfinite().any()
    found[bad] = clean[bad] = 0
    torch.testing.assert_close(found, clean)
