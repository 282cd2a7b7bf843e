"""Requests of many tenants as the ledger sees them: holds of a gateway, ends of an engine."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from engine.wire.records import EndRecord
from server.billing.holds import Hold
from server.billing.prices import Price
from server.billing.rating import amount_nanousd

ENGINE = "engine-of-the-bench"
_MOST_PROMPT, _MOST_COMPLETION = 4000, 800
_LIFETIME_MS = 150_000
_STEP_MS = 37
"""Time between two requests: 20,000 last a quarter of an hour, a million ten hours."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """`count` requests, one after the other, of random length.

    tenants: number of tenants, each with one key and one model.   start_ms: when the first request
    came.
    """

    count: int
    tenants: int
    price: Price
    start_ms: int
    seed: int = 0

    def holds(self) -> Iterator[Hold]:
        for number in range(self.count):
            tenant = number % self.tenants
            chance = random.Random(f"{self.seed} {number}")
            num_prompt = chance.randrange(1, _MOST_PROMPT)
            created_at_ms = self.start_ms + number * _STEP_MS
            yield Hold(
                request_id=f"req_{chance.getrandbits(96):024x}",
                tenant_id=f"ten_{tenant:016x}",
                key_id=f"key_{tenant:08x}",
                model=f"support-{tenant}",
                price_version=self.price.price_version,
                amount_nanousd=amount_nanousd(num_prompt, 0, _MOST_COMPLETION, self.price),
                num_prompt_tokens=num_prompt,
                token_lease=_MOST_COMPLETION,
                engine_id=ENGINE,
                created_at_ms=created_at_ms,
                expires_at_ms=created_at_ms + _LIFETIME_MS,
                adapter_id=f"ad_{tenant:016x}",
                adapter_version=1,
                adapter_digest=_digest(f"adapter {tenant}"),
            )

    def ends(self, holds: list[Hold]) -> Iterator[EndRecord]:
        """Yields the end records of `holds`, in their order, numbered from 1."""
        prompt = cached = completion = 0
        for number, hold in enumerate(holds, start=1):
            chance = random.Random(hold.request_id)
            num_cached = chance.randrange(hold.num_prompt_tokens)
            num_completion = chance.randrange(1, _MOST_COMPLETION)
            prompt += hold.num_prompt_tokens
            cached += num_cached
            completion += num_completion
            ended_at = hold.created_at_ms / 1000 + num_completion * 0.02
            yield EndRecord(
                seq=number,
                at=ended_at,
                number=number,
                total_prompt_tokens=prompt,
                total_cached_tokens=cached,
                total_completion_tokens=completion,
                request_id=hold.request_id,
                tenant_id=hold.tenant_id,
                adapter_digest=hold.adapter_digest,
                base_revision=_digest("base"),
                num_prompt_tokens=hold.num_prompt_tokens,
                num_cached_tokens=num_cached,
                num_completion_tokens=num_completion,
                finish_reason="stop",
                stop_cause="eos",
                output_sha256=_digest(hold.request_id),
                started_at=hold.created_at_ms / 1000,
                first_token_at=hold.created_at_ms / 1000 + 0.2,
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
