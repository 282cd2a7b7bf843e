"""Logprobs of prompt tokens: the head runs over a bounded number of positions at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.steps.batch import ScheduledRow
from engine.steps.sampler import name_tokens
from engine.wire.messages import TokenLogprobs
from kernels.elementwise import is_finite

LOGITS_BYTES = 16 << 20
"""The size of the float32 logits that are held at once, whatever the length of the prompt: 32
positions of a vocabulary of 128k. A larger buffer is mapped anew each time, which takes as long as
a softmax.
"""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The prompt tokens that a step scores, row after row.

    indices: places in the step of the tokens before them, rising.   token_ids: the scored tokens.
    top_counts: how many of the likeliest tokens to report beside each.
    spans: by row number, the places of the row's own among all scored tokens.
    """

    indices: Sequence[int]
    token_ids: Sequence[int]
    top_counts: Sequence[int]
    spans: Mapping[int, slice]

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], firsts: Sequence[int]) -> "ScoredTokens":
        """Collect what these rows score.   firsts: start of each row's tokens in the step."""
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


def chunks(
    num_tokens: int,
    vocab_size: int,
    most_bytes: int = LOGITS_BYTES,
    breaks: Sequence[int] = (),
) -> list[slice]:
    """Parts of `num_tokens` whose logits take at most `most_bytes`; each has at least one token.

    breaks: tokens that begin another part, rising.
    """
    size = max(1, most_bytes // (4 * vocab_size))
    return [
        slice(first, min(first + size, end))
        for start, end in pairwise((0, *breaks, num_tokens))
        for first in range(start, end, size)
    ]


def score(
    head: Callable[[slice], torch.Tensor],
    scored: ScoredTokens,
    vocab_size: int,
    breaks: Sequence[int] = (),
) -> tuple[list[TokenLogprobs], torch.Tensor]:
    """Logprobs of the scored tokens, and [n] bool: whether all logits of a token are finite.

    head: gives the logits at the tokens before some of the scored ones, [part, vocab].
    breaks: scored tokens from which on the vocabulary is another.
    """
    named: list[TokenLogprobs] = []
    finite = torch.ones(len(scored.token_ids), dtype=torch.bool)
    for part in chunks(len(scored.token_ids), vocab_size, breaks=breaks):
        logits = head(part).float()
        finite[part] = is_finite(logits)
        # Bad logits become 0, so that the arithmetic stays sound; nothing of their row is reported.
        logprobs = logits.nan_to_num_(0.0, 0.0, 0.0).log_softmax(dim=-1)
        named += name_tokens(logprobs, scored.token_ids[part], scored.top_counts[part])
    return named, finite
