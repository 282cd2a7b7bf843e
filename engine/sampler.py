"""One token for every row that is due one; a row's choice depends on nothing but itself."""

from collections.abc import Sequence

import torch

from engine.batch import BAD_LOGITS, ScheduledRow
from kernels.sampling import greedy, sample

_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the index-th token of a seed: splitmix64, so no state and no order."""
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1342543DE82EF95) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def choose(logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> list[int]:
    """A token id per row; BAD_LOGITS where one is not finite.   logits: [rows, vocab]."""
    tokens = greedy(logits)
    drawn = [i for i, row in enumerate(rows) if row.sampling and row.sampling.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[i] for i in drawn])
    finite = torch.isfinite(logits).all(dim=-1)
    return torch.where(finite, tokens, BAD_LOGITS).tolist()


def _draw(logits: torch.Tensor, rows: Sequence[ScheduledRow]) -> torch.Tensor:
    params = [row.sampling for row in rows if row.sampling is not None]
    device = logits.device
    # A row with bad logits is replaced by the caller; here it must only not poison the sort.
    return sample(
        torch.nan_to_num(logits),
        temperature=torch.tensor([p.temperature for p in params], device=device),
        top_k=torch.tensor([p.top_k for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        uniform=torch.tensor(
            [uniform(row.seed, row.num_output_tokens) for row in rows],
            dtype=torch.float64,
            device=device,
        ),
    )
