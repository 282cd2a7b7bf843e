"""What an engine found out about an adapter by serving it: plain data for its passport."""

from dataclasses import dataclass
from typing import Literal

# "unavailable" says nothing about the adapter: try again. All others are final.
Verdict = Literal["passed", "not_finite", "no_effect", "mismatch", "not_served", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """An adapter on fixed prompts: served beside others, and merged into the base weights.

    message: for whoever uploaded it, when it did not pass.
    max_effect: largest change of a token's logprob, in nats, that the adapter makes.
    max_difference: largest difference between the served and the merged one's logprobs.
    tolerance: what max_difference may be.   num_tokens: whose logprobs were compared.
    device_bytes: that it takes in the arena.
    cold_load_s: from the object store to the arena; None if it was on its way before.
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
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
