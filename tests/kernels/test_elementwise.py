"""The torch references of the elementwise kernels, against their formulas."""

import pytest
import torch

from kernels.elementwise import apply_rope, is_finite


def test_rope_keeps_lengths_and_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, 8)
    angles = torch.outer(torch.arange(100.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))

    def at(x, position):
        return apply_rope(x, angles[position].cos()[None], angles[position].sin()[None])

    near = (at(q, 5) * at(k, 2)).sum()
    far = (at(q, 95) * at(k, 92)).sum()
    assert torch.allclose(near, far, atol=1e-4)
    assert torch.allclose(at(q, 50).norm(), q.norm(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_marks_its_row(dtype):
    x = torch.randn(5, 33, dtype=dtype)
    x[1, 32], x[2, 0], x[4, 7] = torch.nan, torch.inf, -torch.inf
    x[3] = torch.finfo(dtype).max
    assert is_finite(x).tolist() == [True, False, False, True, False]
