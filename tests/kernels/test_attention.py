"""Attention on paged KV against its formula in float64."""

import pytest
import torch

from kernels.attention import store_kv

BLOCK, KV_HEADS, DIM, LAYERS = 16, 2, 8, 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_told_and_never_stored(bad):
    kv = torch.zeros(3, LAYERS, 2, KV_HEADS, BLOCK, DIM)
    k, v = torch.randn(2, 5, KV_HEADS, DIM)
    k[1, 1, 3] = bad
    v[4, 0, 0] = bad
    slots = torch.tensor([40, 3, 0, 17, 18])
    assert store_kv(kv, 1, k, v, slots).tolist() == [True, False, True, True, False]
    assert kv.isfinite().all()
    assert torch.equal(kv[2, 1, 0, :, 8], k[0])
    assert torch.equal(kv[1, 1, 1, :, 1], v[3])
    assert k[1, 1, 3].isfinite().logical_not(), "the caller's tensor is left alone"
