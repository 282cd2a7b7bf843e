"""Requests per second served within limits that suit a reader, against requests per second sent.

Open loop: requests arrive by a Poisson process, however many are still under way. The bound is the
engine's speed: beyond it the queue grows, and first tokens come too late.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.outcome import Outcome
from bench.report import ratio
from bench.session import Ask, run


@dataclass(frozen=True, kw_only=True)
class Goodput(Experiment):
    """Requests per second that are served within limits of latency.

    window_s: time in which requests arrive.   ttft_limit_s: limit of the first token's time.
    tpot_limit_s: limit of the mean time of each token after it.   attainment: least share of
    requests within limits at which a rate counts as served.
    """

    stack: str = "small-5m"
    rates: tuple[float, ...] = (3.0, 6.0, 10.0, 16.0, 24.0, 36.0)
    window_s: float = 8.0
    prompt_tokens: tuple[int, int] = (64, 256)
    output_tokens: tuple[int, int] = (16, 128)
    ttft_limit_s: float = 1.0
    tpot_limit_s: float = 0.1
    attainment: float = 0.9
    static_batch: int = 8
    max_model_len: int = 512
    arena_tokens: int = 24576
    seed: int = 0

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        sizes = {"continuous": None, "static": self.static_batch, "one_at_a_time": 1}
        curves = {
            name: [self._run(factory, rate_sent, size) for rate_sent in self.rates]
            for name, size in sizes.items()
        }
        best = {name: best_rate(curve, self.attainment) for name, curve in curves.items()}
        return {
            "curves": curves,
            "best_good_per_s": best,
            "continuous_to": {
                name: ratio(best["continuous"], best[name])
                for name in best
                if name != "continuous" and best[name]
            },
        }

    def _run(
        self, factory: EngineFactory, rate_sent: float, batch_size: int | None
    ) -> dict[str, float]:
        asks = self._asks(factory, rate_sent)
        core = factory.make(arena_tokens=self.arena_tokens, max_model_len=self.max_model_len)
        # At stop_s every request has its first token, or has waited too long for it.
        stop_s = self.window_s + self.ttft_limit_s
        outcomes = run(core, asks, batch_size=batch_size, stop_s=stop_s)
        num_good = sum(is_good(o, self.ttft_limit_s, self.tpot_limit_s) for o in outcomes)
        return {
            "sent_per_s": ratio(len(asks), self.window_s),
            "good_per_s": ratio(num_good, self.window_s),
            "good_share": ratio(num_good, len(asks)),
        }

    def _asks(self, factory: EngineFactory, rate_sent: float) -> list[Ask]:
        """Make the requests for a rate; another rate sends the same requests at other times."""
        arrivals, stream = random.Random(f"{self.seed}/arrivals"), random.Random(self.seed)
        asks, due_s = [], 0.0
        while due_s < self.window_s:
            asks.append(
                Ask(
                    prompt_token_ids=factory.random_tokens(
                        stream, stream.randint(*self.prompt_tokens)
                    ),
                    max_tokens=stream.randint(*self.output_tokens),
                    due_s=due_s,
                )
            )
            due_s += arrivals.expovariate(rate_sent)
        return asks


def is_good(outcome: Outcome, ttft_limit_s: float, tpot_limit_s: float) -> bool:
    """Whether the tokens so far kept the limits of TTFT and of time per output token."""
    if not outcome.chunk_s or outcome.ttft_s > ttft_limit_s:
        return False
    gaps = len(outcome.chunk_s) - 1
    return outcome.chunk_s[-1] - outcome.chunk_s[0] <= tpot_limit_s * gaps


def best_rate(curve: Sequence[Mapping[str, float]], attainment: float) -> float:
    """Return the most good requests per second of a rate that reaches `attainment`; 0 if none."""
    return max((p["good_per_s"] for p in curve if p["good_share"] >= attainment), default=0.0)
