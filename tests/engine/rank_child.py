"""`python -m tests.engine.rank_child STORE SIZE`: ranks that check sums, for test_ranks.

The process imports torch once, and its children are the ranks.
"""

import os
import sys
from pathlib import Path

import torch

from engine.models.ranks import TorchRanks
from lora.shard import Shard

WIDTHS = (1, 7, 1000, 4099)


def numbers_of(index: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a rank, all columns equal, to show that a sum does not depend on the place."""
    generator = torch.Generator().manual_seed(index)
    column = torch.randn(16, 1, generator=generator) * 10.0**index
    return column.to(dtype).repeat(1, width).contiguous()


def main() -> None:
    size, children = int(sys.argv[2]), []
    for index in range(size):
        child = os.fork()
        if not child:
            return check(Path(sys.argv[1]), index, size)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * size


def check(store: Path, index: int, size: int) -> None:
    ranks = TorchRanks(Shard(index, size), store, "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for width in WIDTHS:
            found = numbers_of(index, width, dtype)
            ranks.all_reduce(found)
            total = numbers_of(0, width, dtype).float()
            for other in range(1, size):
                total += numbers_of(other, width, dtype).float()
            assert torch.equal(found, total.to(dtype)), (dtype, width)
    ranks.all_reduce(torch.empty(0, 5))
    tokens = torch.arange(5) * (index + 1)
    ranks.broadcast(tokens)
    assert tokens.tolist() == [0, 1, 2, 3, 4]
    assert ranks.least(10 - index) == 10 - size + 1
    if index == size - 1:
        return  # the rank leaves; the others get an error in place of waiting
    try:
        ranks.all_reduce(torch.zeros(3))
    except RuntimeError:
        sys.stdout.write("told\n")


if __name__ == "__main__":
    main()
