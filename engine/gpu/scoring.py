"""Logprobs of prompt tokens on a device, as in `engine.steps.scoring`, without waiting for it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.gpu.linear import Linear
from engine.gpu.sampler import Logprobs, Told, tell
from engine.steps.scoring import ScoredTokens, chunks
from kernels.elementwise import soft_cap_

LOGITS_BYTES = 64 << 20
"""The size of the float32 logits that are held at once. The head's weights are read once for each
such chunk; the best size has not been measured yet.
"""


@dataclass(frozen=True, slots=True)
class ScoringInputs:
    """The tokens that a step scores, as the host knows them.

    tokens: [2, n] int32, places of tokens in the step, and the prompt tokens that follow them.
    """

    scored: ScoredTokens
    tokens: npt.NDArray[np.int32]
    told: Told

    @classmethod
    def of(cls, scored: ScoredTokens, vocab_size: int) -> "ScoringInputs":
        tokens = np.array([scored.indices, scored.token_ids], dtype=np.int32)
        return cls(scored, tokens, Told.of(scored.top_counts, vocab_size))


def score(
    x: torch.Tensor,
    head: Linear,
    vocab_size: int,
    ints: torch.Tensor,
    depth: int,
    logprobs: Logprobs,
    finite: torch.Tensor,
    softcap: float | None = None,
) -> None:
    """Write the scored tokens' logprobs, and 0 into `finite` at each position with bad logits.

    x: [T, hidden], of all tokens.   ints: `tokens`, on the device.
    finite: [T] int32.   softcap: bound of the logits, see `kernels.elementwise.soft_cap_`.
    """
    indices, token_ids = ints.view(2, -1)
    for part in chunks(len(indices), vocab_size, LOGITS_BYTES):
        own = indices[part]
        logits = head(x[own]).float()
        if softcap is not None:
            soft_cap_(logits, softcap)
        finite.index_put_((own,), finite[own] * logits.isfinite().all(dim=-1))
        tell(logits.log_softmax(dim=-1), token_ids[part], depth, logprobs.behind(part.start, depth))
