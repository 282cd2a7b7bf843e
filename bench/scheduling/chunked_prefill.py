"""Effect of a long prompt on running streams, in chunks of the default size and in one piece.

The bound is arithmetic: the prompt's prefill takes the same time either way. In chunks every stream
gets a token per chunk meanwhile; in one piece no stream gets a token.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.outcome import Outcome
from bench.report import percentiles_ms, ratio
from bench.session import Ask, Session


@dataclass(frozen=True, kw_only=True)
class ChunkedPrefill(Experiment):
    """The effect of a long prompt on running streams.

    lead_tokens, tail_tokens: tokens of each stream before and after the long prompt arrives.

    chunk_tokens: max_num_batched_tokens; None is the device's default.   whole_tokens: the same,
    large enough for the long prompt and the streams.
    """

    stack: str = "smollm2-135m"
    streams: int = 8
    stream_prompt_tokens: int = 64
    lead_tokens: int = 16
    tail_tokens: int = 64
    prompt_tokens: int = 3000
    chunk_tokens: int | None = None
    whole_tokens: int = 4096
    max_model_len: int = 4096
    arena_tokens: int = 8192
    seed: int = 0

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        chunked = self._run(factory, self.chunk_tokens)
        whole = self._run(factory, self.whole_tokens)
        return {
            "chunked": chunked,
            "whole": whole,
            "chunked_to_whole": {
                "itl_p99": ratio(chunked["itl_ms"]["p99"], whole["itl_ms"]["p99"]),
                "itl_p99_during_prefill": ratio(
                    chunked["itl_during_prefill_ms"]["p99"], whole["itl_during_prefill_ms"]["p99"]
                ),
                "prompt_ttft": ratio(chunked["prompt_ttft_ms"], whole["prompt_ttft_ms"]),
            },
        }

    def _run(self, factory: EngineFactory, max_num_batched_tokens: int | None) -> dict[str, Any]:
        core = factory.make(
            arena_tokens=self.arena_tokens,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        stream, session = random.Random(self.seed), Session(core)
        for _ in range(self.streams):
            prompt = factory.random_tokens(stream, self.stream_prompt_tokens)
            max_tokens = self.lead_tokens + self.tail_tokens
            session.send(Ask(prompt_token_ids=prompt, max_tokens=max_tokens))
        while min(session.num_tokens(i) for i in range(self.streams)) < self.lead_tokens:
            session.step()
        prompt = factory.random_tokens(stream, self.prompt_tokens)
        session.send(Ask(prompt_token_ids=prompt, max_tokens=1))
        while session.num_open:
            session.step()
        *streams, long = session.outcomes()
        return {
            "max_num_batched_tokens": core.scheduler.config.max_num_batched_tokens,
            "itl_before_ms": percentiles_ms(gaps_between(streams, 0.0, long.sent_s)),
            "itl_during_prefill_ms": percentiles_ms(
                gaps_between(streams, long.sent_s, long.chunk_s[0])
            ),
            "itl_ms": percentiles_ms(gaps_between(streams, long.sent_s, float("inf"))),
            "prompt_ttft_ms": percentiles_ms([long.chunk_s[0] - long.sent_s])["p50"],
        }


def gaps_between(outcomes: Iterable[Outcome], start_s: float, end_s: float) -> list[float]:
    """Return gaps between tokens of one answer that end within (start_s, end_s]."""
    return [
        after - before
        for outcome in outcomes
        for before, after in zip(outcome.chunk_s, outcome.chunk_s[1:], strict=False)
        if start_s < after <= end_s
    ]
