"""The torch meanings of the kernels, against formulas written out in float64."""

import pytest
import torch

from kernels.attention import decode_attention, prefill_attention, store_kv
from kernels.elementwise import apply_rope, rms_norm, silu_mul

BLOCK, HEADS, KV_HEADS, DIM, LAYERS = 16, 6, 2, 8, 2


def attend(q, k, v):
    """[heads, dim] over [T, kv heads, dim], one query, in float64."""
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


@pytest.mark.parametrize("lengths", [[1], [16], [17], [1, 7, 63, 133], [33] * 8])
def test_decode_attention_reads_exactly_its_own_positions(lengths):
    kv, tables, keys, values = make_cache(lengths)
    kv = kv.nan_to_num(nan=1e4)  # finite: a padded position must weigh nothing, not be absent
    depth = max(map(len, tables))
    blocks = torch.tensor([(t + [0] * depth)[:depth] for t in tables])
    q = torch.randn(len(lengths), HEADS, DIM)
    out = decode_attention(q, kv, 1, blocks, torch.tensor(lengths))
    for i in range(len(lengths)):
        expected = attend(q[i], keys[i], values[i])
        assert (out[i].double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 40), (15, 2), (16, 16), (7, 126)])
def test_prefill_attention_is_causal_from_its_start(start, length):
    kv, (table,), (k,), (v,) = make_cache([start + length])
    kv = kv.nan_to_num(nan=1e4)
    q = torch.randn(length, HEADS, DIM)
    out = prefill_attention(q, kv, 1, table, start)
    for i in range(length):
        end = start + i + 1
        assert (out[i].double() - attend(q[i], k[:end], v[:end])).abs().max() < 1e-5


def test_other_layers_are_not_written():
    kv, _, _, _ = make_cache([40])
    assert kv[:, 0].isnan().all()


def test_rms_norm_and_silu_mul_are_their_formulas():
    x, w = torch.randn(5, 64), torch.randn(64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w
    assert torch.allclose(rms_norm(x, w, 1e-5), expected, atol=1e-6)
    gate, up = torch.randn(2, 5, 64)
    assert torch.allclose(silu_mul(gate, up), gate / (1 + (-gate).exp()) * up, atol=1e-6)


def test_rope_keeps_lengths_and_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, DIM)
    angles = torch.outer(torch.arange(100.0), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))

    def at(x, position):
        return apply_rope(x, angles[position].cos()[None], angles[position].sin()[None])

    near = (at(q, 5) * at(k, 2)).sum()
    far = (at(q, 95) * at(k, 92)).sum()
    assert torch.allclose(near, far, atol=1e-4)
    assert torch.allclose(at(q, 50).norm(), q.norm(), atol=1e-5)
