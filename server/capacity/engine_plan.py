"""One engine under a load: what fits into it, how fast it answers, and how much it may be asked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from server.capacity.arena import Arena, Limits, make_arena, sum_ranks
from server.capacity.hardware import Hardware
from server.capacity.replay import Replay, Replayed, Seats
from server.capacity.sizes import ModelSizes, Quantization
from server.capacity.steps import Speed, StepLoad, StepTimes
from server.capacity.traffic import Request, Traffic, spread

_REQUESTS, _REQUESTS_A_USER = 128, 2
"""Requests of a replay: so many at least, and so many of each user."""
_BISECTIONS = 6
_MOST_USERS = 1024
_TOLERANCE = 0.02
_SHARE = 0.95
"""Percentile that the objectives hold for."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Highest p95 of the time to the first token, and of that of each further one; None for any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def broken_by(self, replayed: Replayed) -> str:
        """Name what a replay misses by most, "ttft" or "tpot"; "" if it keeps the objective."""
        missed = {
            "ttft": replayed.ttft_s(_SHARE) / self.ttft_s if self.ttft_s else 0.0,
            "tpot": replayed.tpot_s(_SHARE) / self.tpot_s if self.tpot_s else 0.0,
        }
        worst = max(missed, key=lambda name: missed[name])
        return worst if missed[worst] > 1.0 else ""


@dataclass(frozen=True, slots=True)
class Load:
    """A load on all engines together: requests a second, or users who ask at once.

    A user sends the next request as soon as the last answer has ended.
    """

    rate: float | None = None
    users: int | None = None

    @property
    def size(self) -> float:
        return self.rate if self.rate is not None else float(self.users or 1)

    def of(self, size: float) -> "Load":
        """The same kind of load of another size."""
        return Load(rate=size) if self.rate is not None else Load(users=max(1, int(size)))


class EnginePlan:
    """An engine of one model on so many devices.   speed: its rates by quantization."""

    def __init__(
        self,
        sizes: ModelSizes,
        hardware: Hardware,
        quantization: Quantization,
        num_shards: int,
        limits: Limits,
        traffic: Traffic,
        speed: Callable[[Quantization], Speed],
    ) -> None:
        self.sizes, self.hardware, self.quantization = sizes, hardware, quantization
        self.num_shards, self.limits, self.traffic = num_shards, limits, traffic
        self.arena: Arena = make_arena(
            sizes, hardware, quantization, num_shards, limits, traffic.max_rank
        )
        self.times = StepTimes(
            sizes, quantization, hardware.itemsize, self.arena.layout, speed(quantization)
        )
        self.seats = Seats(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            self.arena.num_slabs,
            self.arena.layout.block_size,
            self.arena.adapter_slabs,
            sum_ranks(limits, hardware, self.arena, sizes.used_share),
        )

    @property
    def fits(self) -> bool:
        """Whether the longest request fits, with its adapter."""
        return self.most_requests_of(self.traffic.longest) > 0

    def most_requests_of(self, num_tokens: int) -> int:
        """Requests of so many tokens that run at once, by memory and by seats."""
        in_arena = self.arena.most_requests(num_tokens, self.traffic.num_adapters)
        return min(self.limits.max_num_seqs, in_arena)

    def replay(self, load: Load) -> Replayed:
        """Serve a load with this engine alone. The engine must fit."""
        return Replay(self.times, self.seats, self._requests(load)).run()

    def _requests(self, load: Load) -> Iterator[Request]:
        if load.rate is not None:
            yield from self.traffic.requests(_REQUESTS, load.rate)
            return
        users = load.users or 1
        requests = self.traffic.requests(max(_REQUESTS, _REQUESTS_A_USER * users))
        yield from spread(requests, users, self._alone_s * min(users, self.limits.max_num_seqs))

    @cached_property
    def _alone_s(self) -> float:
        """Time of the prompts of one request, by which users begin apart."""
        tokens = min(round(self.traffic.prompt_tokens.mean), self.limits.max_num_batched_tokens)
        load = StepLoad(tokens, 1, 1, tokens, tokens * tokens / 2)
        return self.times.seconds(load) * self.traffic.prompt_tokens.mean / tokens

    def capacity(self, kind: Load, objective: Objective) -> Load | None:
        """The largest load of a kind that keeps the objective; None if none does.

        Without an objective it is the load under which the engine is never idle. It does not depend
        on what is asked, so that more traffic never needs fewer engines.
        """
        if kind.rate is None:
            return self._most_users(objective)
        full = self.replay(Load(users=self.most_requests_of(self.traffic.mean)))
        most = full.output_tokens_per_s / self.traffic.output_tokens.mean
        if objective == Objective():
            return Load(rate=most)
        low, high = 0.0, most
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if objective.broken_by(self.replay(Load(rate=middle))):
                high = middle
            else:
                low = middle
        return Load(rate=low) if low else None

    def _most_users(self, objective: Objective) -> Load | None:
        if objective == Objective():
            return Load(users=self.most_requests_of(self.traffic.mean))
        low, high = 0, 1
        while high <= _MOST_USERS and not objective.broken_by(self.replay(Load(users=high))):
            low, high = high, 2 * high
        while high - low > max(1, _TOLERANCE * low):
            middle = (low + high) // 2
            if objective.broken_by(self.replay(Load(users=middle))):
                high = middle
            else:
                low = middle
        return Load(users=low) if low else None
