"""Requests of a pool, with their times and adapters: pure, and decided by the seed alone."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from registry.ref import AdapterRef

_RANKS, _SHARES = (8, 16, 32, 64), (50, 30, 15, 5)
_BYTES_OF_A_RANK = 5_250_000
"""Bytes per rank of all seven projections of an 8B model in 16 bits: 84 MB at rank 16."""
_TENANTS = 50


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. adapter: number of its adapter, 0 is the most popular; None is the base model.

    beginning: number of the prompt's prefix among its adapter's shared prefixes.
    """

    number: int
    at_s: float
    adapter: int | None
    beginning: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Poisson arrivals; adapter n is asked for in proportion to (n + 1) ** -exponent.

    burst_share: share of the requests that name one adapter, drawn anew every `burst_s`, however
    rare it was.   prompt_tokens, output_tokens: uniform, both ends included.
    beginnings: number of shared prefixes of each adapter's prompts.
    """

    adapters: int = 1000
    exponent: float = 1.0
    burst_share: float = 0.0
    burst_s: float = 10.0
    prompt_tokens: tuple[int, int] = (128, 896)
    output_tokens: tuple[int, int] = (32, 224)
    beginnings: int = 4

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(self.prompt_tokens) / 2

    @property
    def mean_output_tokens(self) -> float:
        return sum(self.output_tokens) / 2

    def arrivals(self, rate: float, seconds: float, seed: int) -> list[Arrival]:
        """Make `rate` requests per second. Each aspect has a random stream of its own, so that
        another rate asks for the same adapters in the same order.
        """
        gaps, lengths = (random.Random(f"{seed}/{name}") for name in ("gaps", "lengths"))
        choose = self._chooser(seed)
        arrivals: list[Arrival] = []
        while (at_s := gaps.expovariate(rate) + (arrivals[-1].at_s if arrivals else 0.0)) < seconds:
            prompt_tokens = lengths.randint(*self.prompt_tokens)
            output_tokens = lengths.randint(*self.output_tokens)
            beginning = lengths.randrange(self.beginnings)
            arrivals.append(
                Arrival(len(arrivals), at_s, choose(at_s), beginning, prompt_tokens, output_tokens)
            )
        return arrivals

    def _chooser(self, seed: int) -> Callable[[float], int | None]:
        """Return a function that draws the adapter of a request, given the request's time."""
        if not self.adapters:
            return lambda _: None
        stream, fashion = random.Random(f"{seed}/adapters"), random.Random(f"{seed}/fashion")
        numbers = range(self.adapters)
        weights = list(itertools.accumulate((n + 1) ** -self.exponent for n in numbers))
        in_fashion: list[int] = []

        def choose(at_s: float) -> int:
            while len(in_fashion) <= at_s / self.burst_s:
                in_fashion.append(fashion.randrange(self.adapters))
            (number,) = stream.choices(numbers, cum_weights=weights)
            is_burst = stream.random() < self.burst_share
            return in_fashion[int(at_s / self.burst_s)] if is_burst else number

        return choose


@dataclass(frozen=True, slots=True)
class Adapter:
    ref: AdapterRef
    tenant_id: str


def make_adapters(count: int, seed: int) -> list[Adapter]:
    """Make adapters with random ranks, which do not depend on their popularity."""
    ranks = random.Random(f"{seed}/ranks").choices(_RANKS, _SHARES, k=count)
    return [
        Adapter(
            AdapterRef(
                adapter_id=f"adapter-{number}",
                version=1,
                digest=f"{number:064x}",
                object_key=f"tenants/{number % _TENANTS}/{number:064x}",
                rank=rank,
                size_bytes=rank * _BYTES_OF_A_RANK,
            ),
            tenant_id=str(number % _TENANTS),
        )
        for number, rank in enumerate(ranks)
    ]
