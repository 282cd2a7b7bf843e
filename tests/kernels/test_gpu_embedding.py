"""The embedding of tokens that the host knows, and of tokens that only the device knows."""

import pytest
import torch

from kernels import reference
from kernels.gpu.embedding import embed
from tests.kernels.far_rows import far_rows


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 576, 4096])
def test_tokens_are_the_hosts_or_the_step_befores(dtype, hidden):
    table = torch.randn(11, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    input_ids, sources = ints(3, -2, 10, -2, 0, 5, -2), ints(-1, 2, -1, 0, -1, -1, 1)
    previous = ints(9, -1, 10)
    ours = embed(table, input_ids, sources, previous)
    assert torch.equal(ours, reference.embed(table, input_ids, sources, previous))
    assert torch.equal(ours, table[[3, 10, 10, 9, 0, 5, 0]])


def test_a_source_of_tokens_that_are_not_there_is_not_read():
    table = torch.arange(6.0).view(3, 2)
    previous = torch.full((2**20,), 1, dtype=torch.int32)[:0]
    assert torch.equal(embed(table, ints(2, 1), ints(-1, -1), previous), table[[2, 1]])


def test_a_row_of_a_table_in_wider_rows_is_read_alone():
    table = torch.full((5, 9), torch.nan)
    table[:, :4] = torch.arange(20.0).view(5, 4)
    wanted = table[[4, 0], :4]
    assert torch.equal(embed(table[:, :4], ints(4, 0), ints(-1, -1), ints(0)), wanted)


def test_entries_past_32_bits_are_their_own():
    table = far_rows(5, 7, torch.float16)
    table[:] = torch.arange(35).view(5, 7)
    tokens = ints(4, 1, -2)
    assert torch.equal(embed(table, tokens, ints(-1, -1, 0), ints(3)), table[[4, 1, 3]])
