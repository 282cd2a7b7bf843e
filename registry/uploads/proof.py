"""Result of an engine's proof of an adapter: plain data for the adapter's passport."""

from dataclasses import dataclass
from typing import Literal

# The last two are no verdicts on the adapter. After "unavailable" the proof is tried again;
# "proof_failed" is final, as are the others: the proof itself failed, by an error of ours.
Verdict = Literal[
    "passed", "not_finite", "no_effect", "mismatch", "not_served", "unavailable", "proof_failed"
]
PROOF_FAILED = (
    "The proof failed by an error of the server, not of the adapter. Tell the operator, whose log "
    "of the engine has the reason; then upload the adapter again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Comparison of an adapter on fixed prompts: served beside others, and merged into the base.

    message: explains to the uploader why the adapter did not pass.
    max_effect: largest change of a token's logprob, in nats, that the adapter makes.
    max_difference: largest difference between logprobs of the served and the merged adapter.
    tolerance: limit of max_difference.   num_tokens: tokens whose logprobs were compared.
    device_bytes: bytes that the adapter takes in the arena.
    base_shift: largest change of a logprob, in nats, by rounding the base model's weights to few
    bits, with the adapter.   base_agreement: share of tokens that stay the likeliest. Both are None
    if the weights are as they were trained, or if the engine does not know how they were.
    cold_load_s: time of the load from the object store to the arena; None if it had begun before.
    """

    verdict: Verdict
    message: str = ""
    max_effect: float = 0.0
    max_difference: float = 0.0
    tolerance: float = 0.0
    num_prompts: int = 0
    num_tokens: int = 0
    device_bytes: int = 0
    cold_load_s: float | None = None
    base_shift: float | None = None
    base_agreement: float | None = None
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
