"""Attention on paged KV, against its formula written out in float64."""

import pytest
import torch

from kernels.attention import prefill_attention, store_kv

BLOCK, HEADS, KV_HEADS, DIM, LAYERS = 16, 6, 2, 8, 2


def attend(q, k, v):
    """Attend with one query, [heads, dim], to [T, kv heads, dim], in float64."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) / DIM**0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)


def make_cache(lengths, seed=0):
    """Sequences written to scattered blocks of a cache that is NaN elsewhere."""
    torch.manual_seed(seed)
    num_blocks = sum(-(-n // BLOCK) for n in lengths)
    kv = torch.full((num_blocks + 3, LAYERS, 2, KV_HEADS, BLOCK, DIM), torch.nan)
    free = torch.randperm(num_blocks + 3).tolist()
    tables, keys, values = [], [], []
    for length in lengths:
        table = [free.pop() for _ in range(-(-length // BLOCK))]
        k, v = torch.randn(2, length, KV_HEADS, DIM)
        slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])
        store_kv(kv, 1, k, v, slots)
        tables.append(table)
        keys.append(k)
        values.append(v)
    return kv, tables, keys, values


WINDOWS = pytest.mark.parametrize("window", [None, 1, 5, 16, 24, 1000])


@WINDOWS
@pytest.mark.parametrize(
    ("start", "length"), [(0, 1), (132, 1), (0, 40), (15, 2), (16, 16), (7, 126)]
)
def test_prefill_attention_is_causal_from_its_start(start, length, window):
    kv, (table,), (k,), (v,) = make_cache([start + length])
    kv = kv.nan_to_num(nan=1e4)
    q = torch.randn(length, HEADS, DIM)
    out = prefill_attention(q, kv, 1, table, start, window)
    for i in range(length):
        end = start + i + 1
        seen = slice(max(0, end - (window or end)), end)
        assert (out[i].double() - attend(q[i], k[seen], v[seen])).abs().max() < 1e-5


def test_other_layers_are_not_written():
    kv, _, _, _ = make_cache([40])
    assert kv[:, 0].isnan().all()


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
