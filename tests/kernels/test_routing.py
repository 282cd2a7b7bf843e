"""The choice of experts is transformers', and a row's bits depend on the row only."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kernels.routing import choose_experts


def random(num_rows, num_experts, seed=0):
    return torch.randn(num_rows, num_experts, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (60, 4), (128, 8), (3, 3)])
@pytest.mark.parametrize("norms_weights", [False, True])
def test_experts_and_weights_are_those_of_transformers(num_experts, per_token, norms_weights):
    sizes = {"num_local_experts": num_experts, "num_experts_per_tok": per_token}
    routers = [
        Qwen3MoeTopKRouter(
            AutoConfig.for_model("qwen3_moe", norm_topk_prob=norms_weights, hidden_size=64, **sizes)
        )
    ]
    if norms_weights:
        routers.append(MixtralTopKRouter(AutoConfig.for_model("mixtral", hidden_size=64, **sizes)))
    x, weight = random(33, 64), random(num_experts, 64, seed=1)
    for router in routers:
        router.weight.data = weight
        logits, expected, indices = router(x)
        chosen, weights = choose_experts(logits, per_token, norms_weights=norms_weights)
        assert torch.equal(chosen, indices)
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (60, 4), (128, 8), (7, 7)])
def test_a_rows_bits_do_not_depend_on_others(num_experts, per_token):
    logits = random(130, num_experts)
    together = choose_experts(logits, per_token, norms_weights=True)
    for start, end in [(0, 1), (5, 7), (1, 18), (63, 64), (33, 130)]:
        alone = choose_experts(logits[start:end], per_token, norms_weights=True)
        assert all(torch.equal(a, b[start:end]) for a, b in zip(alone, together, strict=True))


def test_a_row_that_is_not_finite_spoils_no_other():
    logits = random(3, 8)
    expected = choose_experts(logits, 2, norms_weights=True)
    logits[1, 4] = torch.nan
    chosen, weights = choose_experts(logits, 2, norms_weights=True)
    assert weights[1].isnan().all()
    assert chosen.min() >= 0
    for row in (0, 2):
        assert torch.equal(chosen[row], expected[0][row])
        assert torch.equal(weights[row], expected[1][row])


def test_no_rows_have_no_experts():
    chosen, weights = choose_experts(torch.empty(0, 8), 2, norms_weights=True)
    assert chosen.shape == weights.shape == (0, 2)
