"""Tiled attention against `kernels.attention`, and against itself in other batches and chunks."""

import pytest
import torch

from kernels import attention
from kernels.cpu import tiled_attention
from kernels.cpu.plain import PlainKernels
from kernels.lora import add_lora, add_lora_by_tiles
from tests.soak import soak

NUM_BLOCKS = 60


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sequences:
    """Rows of several lengths in scattered blocks; queries for every token of each."""

    def __init__(self, heads, kv_heads, dim, block_size, lengths=(1, 40, 64, 65, 133)):
        self.lengths = lengths
        self.block_size = block_size
        self.kv = randn(NUM_BLOCKS, 2, 2, kv_heads, block_size, dim)
        free = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist())
        self.blocks = [[next(free) for _ in range(-(-n // block_size))] for n in lengths]
        self.queries = [randn(n, heads, dim, seed=n) for n in lengths]

    def prefill(self, module, row, start, end, window):
        blocks = self.blocks[row][: -(-end // self.block_size)]
        q = self.queries[row][start:end]
        return module.prefill_attention(q, self.kv, 1, blocks, start, window)

    def decode(self, module, rows, window):
        """Attend with the last tokens of `rows`."""
        depth = max(len(self.blocks[row]) for row in rows)
        blocks = torch.tensor(
            [(self.blocks[r] + self.blocks[r][-1:] * depth)[:depth] for r in rows]
        )
        q = torch.stack([self.queries[row][-1] for row in rows])
        lengths = torch.tensor([self.lengths[row] for row in rows])
        return module.decode_attention(q, self.kv, 1, blocks, lengths, window)


SHAPES = [(4, 2, 16, 16), (9, 3, 64, 16), (4, 4, 32, 48), (6, 1, 20, 128)]
"""(heads, kv heads, head_dim, block size)"""


@pytest.mark.parametrize("window", [None, 70, *soak(7)])
@pytest.mark.parametrize("shape", [*SHAPES[1:], *soak((SHAPES[0],))])
def test_it_means_what_the_reference_means(shape, window):
    sequences = Sequences(*shape)
    for row, length in enumerate(sequences.lengths):
        for start in {0, length // 2}:
            found, expected = (
                sequences.prefill(module, row, start, length, window)
                for module in (tiled_attention, attention)
            )
            torch.testing.assert_close(found, expected)
    found, expected = (
        sequences.decode(module, range(5), window) for module in (tiled_attention, attention)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 70, *soak(7)])
@pytest.mark.parametrize("shape", [*SHAPES[1:], *soak((SHAPES[0],))])
def test_a_token_has_the_same_bits_in_every_batch_and_chunk(shape, window):
    sequences = Sequences(*shape)
    whole = [
        sequences.prefill(tiled_attention, row, 0, length, window)
        for row, length in enumerate(sequences.lengths)
    ]
    for row, length in enumerate(sequences.lengths):
        for start, end in ((0, 1), (length // 3, length), (length - 1, length), (0, length // 2)):
            if end > start:
                chunk = sequences.prefill(tiled_attention, row, start, end, window)
                assert torch.equal(chunk, whole[row][start:end])
    for rows in ([4], [0, 4], [1, 2, 3], range(5)):
        decoded = sequences.decode(tiled_attention, rows, window)
        assert torch.equal(decoded, torch.stack([whole[row][-1] for row in rows]))


@pytest.mark.usefixtures("threads")
def test_adapters_on_more_rows_are_the_same_bits():
    tiles = [(randn(8, 96, seed=i), randn(8, 131, seed=9 + i)) for i in range(3)]
    x, y = randn(70, 96), randn(70, 131, seed=5)
    expected, plain = y.clone(), y.clone()
    add_lora_by_tiles(expected, x, tiles, 0.3)
    add_lora(plain, x, tiles, 0.3)
    torch.testing.assert_close(expected, plain)
    for first, end in ((0, 1), (3, 5), (7, 23), (15, 32), (1, 70)):
        found = y[first:end].clone()
        add_lora_by_tiles(found, x[first:end], tiles, 0.3)
        assert torch.equal(found, expected[first:end])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [67, 131, 4099])
def test_norms_and_activations_of_more_rows_are_the_same_bits(width):
    kernels = PlainKernels(None, is_invariant=True)
    rows, weight = 3 * randn(130, 2 * width), randn(width)
    for operation in (
        kernels.silu_mul,
        lambda x: kernels.rms_norm(x[:, :width], weight, 1e-6),
        lambda x: kernels.add_rms_norm(x[:, :width].clone(), x[:, width:], weight, 1e-6),
    ):
        expected = operation(rows)
        for first, end in ((0, 1), (1, 3), (5, 21), (3, 67), (2, 130)):
            assert torch.equal(operation(rows[first:end].clone()), expected[first:end])
