"""Requests to plan for: how long they are, which adapters they use, when they come."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

Popularity = Literal["uniform", "zipf", "identical"]
POPULARITIES: tuple[str, ...] = get_args(Popularity)

_ZIPF_EXPONENT = 1.0
_SEED = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform numbers of tokens from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse "512" or "256:1024". Raises ValueError."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"lengths have the form 64 or 64:256, not {text!r}")
        return lengths

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    adapter: its number, None for the base model.   rank: of the adapter, 0 without.   arrival_s:
    None if it comes when an earlier one has ended.
    """

    num_prompt: int
    num_output: int
    adapter: int | None = None
    rank: int = 0
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """The kind of requests.   ranks: of the adapters, in turn."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    num_adapters: int = 0
    ranks: tuple[int, ...] = (16,)
    popularity: Popularity = "uniform"

    @property
    def max_rank(self) -> int:
        return max(self.ranks) if self.num_adapters else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_tokens.high + self.output_tokens.high

    @property
    def mean(self) -> int:
        """Tokens of a request, on average."""
        return round(self.prompt_tokens.mean + self.output_tokens.mean)

    def requests(self, count: int, rate: float | None = None) -> list[Request]:
        """The first `count` requests, the same ones at any rate.

        rate: requests a second, of a Poisson process that starts at 0; None if each of a number of
        users sends the next one as soon as an answer has ended.
        """
        streams = [random.Random(f"{_SEED}/{name}") for name in ("lengths", "adapters", "arrivals")]
        lengths, adapters, arrivals = streams
        chosen = self._adapters(adapters, count)
        now, made = 0.0, []
        for number in range(count):
            prompt = lengths.randint(self.prompt_tokens.low, self.prompt_tokens.high)
            output = lengths.randint(self.output_tokens.low, self.output_tokens.high)
            adapter = chosen[number] if chosen else None
            rank = 0 if adapter is None else self.ranks[adapter % len(self.ranks)]
            made.append(Request(prompt, output, adapter, rank, None if rate is None else now))
            now += arrivals.expovariate(1.0) / (rate or 1.0)
        return made

    def _adapters(self, stream: random.Random, count: int) -> Sequence[int]:
        if not self.num_adapters:
            return ()
        exponent = {"uniform": 0.0, "zipf": _ZIPF_EXPONENT}.get(self.popularity)
        if exponent is None:
            return [0] * count
        weights = [1.0 / place**exponent for place in range(1, self.num_adapters + 1)]
        return stream.choices(range(self.num_adapters), cum_weights=[*accumulate(weights)], k=count)


def percentile(values: Sequence[float], share: float) -> float:
    """Value below which a share of the values lies, linear between neighbours."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(requests: Sequence[Request], users: int, span_s: float) -> Iterator[Request]:
    """Yield requests of so many users: the first of each within `span_s`, the others later."""
    for number, r in enumerate(requests):
        arrival = span_s * number / users if number < users else None
        yield Request(r.num_prompt, r.num_output, r.adapter, r.rank, arrival)
