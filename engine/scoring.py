"""Logprobs of prompt tokens: the head over many positions, a bounded number at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.batch import ScheduledRow
from engine.messages import TokenLogprobs
from engine.sampler import name_tokens
from kernels.elementwise import is_finite

LOGITS_BYTES = 16 << 20
"""The size of the float32 logits that are held at once, whatever the length of the prompt: 32
positions of a vocabulary of 128k. A larger buffer is mapped anew each time, which takes as long as
a softmax.
"""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The prompt tokens that a step scores, row after row.

    indices: of the step's tokens, those that come before them, rising.   token_ids: they
    themselves.   top_counts: of the likeliest tokens to name beside each.
    spans: by row number, where the row's own are among all.
    """

    indices: Sequence[int]
    token_ids: Sequence[int]
    top_counts: Sequence[int]
    spans: Mapping[int, slice]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], firsts: Sequence[int]) -> "ScoredTokens":
        """What these rows score.   firsts: where each row's tokens start in the step."""
        indices: list[int] = []
        token_ids: list[int] = []
        top_counts: list[int] = []
        spans: dict[int, slice] = {}
        for number, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            if (scoring := row.scoring) is not None:
                start, count = first + scoring.first, len(scoring.token_ids)
                spans[number] = slice(len(indices), len(indices) + count)
                indices += range(start, start + count)
                token_ids += scoring.token_ids
                top_counts += [scoring.num_top] * count
        return cls(indices, token_ids, top_counts, spans)

    def by_row(self, named: Sequence[TokenLogprobs]) -> dict[int, Sequence[TokenLogprobs]]:
        """Logprobs by row number.   named: one for each scored token, in their order."""
        return {number: named[span] for number, span in self.spans.items()}


def chunks(num_tokens: int, vocab_size: int, most_bytes: int = LOGITS_BYTES) -> list[slice]:
    """Parts of `num_tokens` whose logits take at most `most_bytes`; each has at least one token."""
    size = max(1, most_bytes // (4 * vocab_size))
    return [slice(first, first + size) for first in range(0, num_tokens, size)]


def score(
    head: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    scored: ScoredTokens,
    vocab_size: int,
) -> tuple[list[TokenLogprobs], torch.Tensor]:
    """The tokens' logprobs, and for which of them all logits are finite, [n] bool.

    head: x -> logits.   x: [n, hidden], of the tokens before them.
    """
    named: list[TokenLogprobs] = []
    finite = torch.ones(len(x), dtype=torch.bool)
    for part in chunks(len(x), vocab_size):
        logits = head(x[part]).float()
        finite[part] = is_finite(logits)
        # Of a row with bad logits nothing is told; here it must only not poison the arithmetic.
        logprobs = logits.nan_to_num_(0.0, 0.0, 0.0).log_softmax(dim=-1)
        named += name_tokens(logprobs, scored.token_ids[part], scored.top_counts[part])
    return named, finite
