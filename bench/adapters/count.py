"""Throughput and time to the first token by how many adapters are registered.

A closed loop at saturation: more clients than seats, each sends its next request when its last one
has ended. A run begins with every adapter in the store only and is measured after a warm-up.

`renamed` is the run that 1,000 adapters are compared with: the very same requests, but while an
adapter has a request in the system, the request names one of 32 pinned adapters instead. So a step
has as many distinct adapters, and nothing is loaded. The bound is the arithmetic of the model, and
of LoRA by the distinct adapters of a step; other threads and processes do the loading meanwhile.
"""

import itertools
import random
import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bench.adapters.engine_loop import EngineLoop
from bench.adapters.objects import RandomObjects
from bench.adapters.shapes import TARGETS, slabs_of
from bench.adapters.tiers import Tiers, fetching
from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import percentiles_ms, rate, ratio, rounded
from engine.core import EngineCore
from engine.messages import EngineStats, RequestOutput, TierStats
from registry.ref import AdapterRef

_ROOM = 2
"""Free disk needed, as a multiple of all objects' bytes: the objects and their packed files."""
_POPULARITIES = {"zipf": 1.0, "uniform": 0.0}
"""Exponents: the n-th adapter is requested in proportion to n ** -exponent."""


class _Names(Protocol):
    """Choice of the adapter that a request for adapter `number` names."""

    def take(self, number: int) -> AdapterRef: ...
    def give_back(self, number: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Count(Experiment):
    """Speed by the number of registered adapters.

    counts: how many adapters are registered, run by run.   compared: the count whose run with zipf
    alternates with `renamed` and with the smallest count, `repeats` times.   requests: how many end
    while a run is measured, after `warm_up` have ended.   resident: adapters that fit into the
    arena beside the KV of `max_num_seqs` requests.

    Lengths of prompts and answers are uniform within their bounds; adapter n belongs to tenant
    n % tenants.
    """

    stack: str = "smollm2-135m"
    counts: tuple[int, ...] = (5, 100, 1000, 5000)
    compared: int = 1000
    resident: int = 32
    rank: int = 8
    targets: str = "q,v"
    clients: int = 32
    max_num_seqs: int = 16
    tenants: int = 16
    prompt_tokens: tuple[int, int] = (32, 64)
    output_tokens: tuple[int, int] = (16, 32)
    warm_up: int = 40
    requests: int = 112
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.clients <= self.resident, "every request may need a name of its own"

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        objects = RandomObjects(factory.layout.shape, self.rank, TARGETS[self.targets])
        store = factory.folder / "objects"
        refs = _register(objects, max(*self.counts, self.resident), store)
        quota_bytes = shutil.disk_usage(factory.folder).free // 2
        with fetching(factory.folder, store.as_uri(), quota_bytes=quota_bytes) as tiers:
            return self._measure(_Runs(self, factory, tiers, refs))

    def _measure(self, runs: "_Runs") -> dict[str, Any]:
        fewest, compared, renamed = [], [], []
        for _ in range(self.repeats):
            fewest.append(runs.run(min(self.counts), "zipf"))
            compared.append(runs.run(self.compared, "zipf"))
            renamed.append(runs.run(self.compared, "zipf", is_renamed=True))
        known = {
            ("zipf", min(self.counts)): _median_of(fewest),
            ("zipf", self.compared): _median_of(compared),
        }
        return {
            "compared_to_renamed": _ratios(compared, renamed),
            "compared_to_fewest": _ratios(compared, fewest),
            "renamed": _median_of(renamed),
        } | {
            popularity: {
                str(count): known.get((popularity, count)) or runs.run(count, popularity).figures()
                for count in self.counts
            }
            for popularity in _POPULARITIES
        }


class _Runs:
    """Runs over one store and one fetcher, each with a fresh engine and an empty disk cache."""

    def __init__(
        self, plan: Count, factory: EngineFactory, tiers: Tiers, refs: Sequence[AdapterRef]
    ) -> None:
        self.plan, self.factory, self.tiers, self.refs = plan, factory, tiers, refs

    def run(self, count: int, popularity: str, *, is_renamed: bool = False) -> "_Window":
        self.tiers.forget()
        engine = EngineLoop(self._make_core())
        names: _Names = _Own(self.refs)
        if is_renamed:
            residents = tuple(self.refs[: self.plan.resident])
            engine.pin(residents)
            names = _Renamed(residents)
        clients = _Clients(self.plan, self.factory, engine, names, count, popularity)
        clients.serve(self.plan.warm_up)
        return clients.serve(self.plan.requests)

    def _make_core(self) -> EngineCore:
        plan, layout = self.plan, self.factory.layout
        longest = plan.prompt_tokens[1] + plan.output_tokens[1]
        adapter_slabs = slabs_of(layout, plan.rank, TARGETS[plan.targets])
        return self.tiers.make_core(
            self.factory,
            num_slabs=plan.resident * adapter_slabs
            + plan.max_num_seqs * layout.num_blocks(longest),
            max_model_len=longest,
            max_num_seqs=plan.max_num_seqs,
            max_pinned_share=1.0,
        )


class _Own:
    """Every adapter goes by its own name."""

    def __init__(self, refs: Sequence[AdapterRef]) -> None:
        self._refs = refs

    def take(self, number: int) -> AdapterRef:
        return self._refs[number]

    def give_back(self, number: int) -> None:
        pass


class _Renamed:
    """An adapter goes by the name of a resident adapter, which no other adapter uses as long as it
    has a request in the system.
    """

    def __init__(self, residents: Sequence[AdapterRef]) -> None:
        self._free = deque(residents)
        self._names: dict[int, AdapterRef] = {}
        self._num_users: dict[int, int] = {}

    def take(self, number: int) -> AdapterRef:
        if number not in self._names:
            self._names[number] = self._free.popleft()
        self._num_users[number] = self._num_users.get(number, 0) + 1
        return self._names[number]

    def give_back(self, number: int) -> None:
        self._num_users[number] -= 1
        if not self._num_users[number]:
            self._free.append(self._names.pop(number))


@dataclass(slots=True)
class _Open:
    """A request in the system. adapter: number of the adapter."""

    adapter: int
    sent_s: float


class _Clients:
    """Closed loop of `plan.clients` clients; the plan's seed alone decides their requests."""

    def __init__(
        self,
        plan: Count,
        factory: EngineFactory,
        engine: EngineLoop,
        names: _Names,
        count: int,
        popularity: str,
    ) -> None:
        self.plan, self.factory, self.engine, self.names = plan, factory, engine, names
        exponent = _POPULARITIES[popularity]
        weights = [(number + 1) ** -exponent for number in range(count)]
        self._numbers = range(count)
        self._weights = list(itertools.accumulate(weights))
        self._random = random.Random(plan.seed)
        self._num_sent = 0
        self._open: dict[str, _Open] = {}

    def serve(self, num_requests: int) -> "_Window":
        """Serves until `num_requests` have ended; requests that are open then stay open."""
        window = _Window(self.engine)
        while window.num_ended < num_requests:
            while len(self._open) < self.plan.clients:
                self._send()
            outputs = self.engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                self._take(output, window, now_s)
        window.close()
        return window

    def _send(self) -> None:
        plan, stream = self.plan, self._random
        (number,) = stream.choices(self._numbers, cum_weights=self._weights)
        prompt = self.factory.random_tokens(stream, stream.randint(*plan.prompt_tokens))
        max_tokens = stream.randint(*plan.output_tokens)
        tenant_id = f"tenant-{number % plan.tenants}"
        sent_s = time.perf_counter()
        adapter = self.names.take(number)
        request_id = self.engine.send(adapter, prompt, max_tokens, tenant_id)
        self._open[request_id] = _Open(number, sent_s)
        self._num_sent += 1

    def _take(self, output: RequestOutput, window: "_Window", now_s: float) -> None:
        request = self._open[output.request_id]
        window.num_tokens += len(output.new_token_ids)
        if output.num_completion_tokens == len(output.new_token_ids) > 0:
            window.ttft_s.append(now_s - request.sent_s)
        if output.is_last:
            window.num_ended += 1
            self.names.give_back(request.adapter)
            del self._open[output.request_id]


class _Window:
    """Counts what happens between its creation and `close`."""

    def __init__(self, engine: EngineLoop) -> None:
        self.num_ended = self.num_tokens = 0
        self.ttft_s: list[float] = []
        self._engine = engine
        self._before, self._start = engine.core.take_stats(), engine.log.totals()
        self._start_s = time.perf_counter()

    def close(self) -> None:
        self.seconds = time.perf_counter() - self._start_s
        self.after, self.end = self._engine.core.take_stats(), self._engine.log.totals()

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        steps, rows, adapters = (b - a for a, b in zip(self._start, self.end, strict=True))
        before, after = self._before, self.after
        return {
            "output_tokens_per_s": rounded(self.tokens_per_s),
            "requests_per_s": rate(self.num_ended, self.seconds),
            "ttft_ms": percentiles_ms(self.ttft_s),
            "distinct_adapters_per_step": rounded(adapters / steps),
            "requests_per_step": rounded(rows / steps),
            "hit_rate": {
                tier: _hit_rate(before, after, tier) for tier in ("device", "host", "disk")
            },
            "fetched": _tier(after, "disk").loads - _tier(before, "disk").loads,
            "placed": _tier(after, "device").loads - _tier(before, "device").loads,
            "evictions": after.adapter_evictions - before.adapter_evictions,
            "preemptions": after.preemptions - before.preemptions,
        }


def _tier(stats: EngineStats, name: str) -> TierStats:
    return next(tier for tier in stats.tiers if tier.tier == name)


def _hit_rate(before: EngineStats, after: EngineStats, name: str) -> float | None:
    """Hits as a share of the lookups in tier `name`; None if there were none."""
    old, new = _tier(before, name), _tier(after, name)
    hits, misses = new.hits - old.hits, new.misses - old.misses
    return rounded(hits / (hits + misses)) if hits + misses else None


def _ratios(ours: Sequence[_Window], theirs: Sequence[_Window]) -> dict[str, Any]:
    """Ratios of throughputs, turn by turn, and their median."""
    of_each = [ratio(a.tokens_per_s, b.tokens_per_s) for a, b in zip(ours, theirs, strict=True)]
    return {"median": median(of_each), "of_each": of_each}


def _median_of(windows: Sequence[_Window]) -> dict[str, Any]:
    """The figures of the run whose throughput is the median, and the throughput of each."""
    in_order = sorted(windows, key=lambda window: window.tokens_per_s)
    return in_order[len(windows) // 2].figures() | {
        "output_tokens_per_s_of_each": [rounded(window.tokens_per_s) for window in windows]
    }


def _register(objects: RandomObjects, count: int, root: Path) -> list[AdapterRef]:
    """Writes objects under `root` where LocalStorage keeps them, without its sync of each."""
    needed = _ROOM * count * objects.size_bytes
    free = shutil.disk_usage(root.parent).free
    if free < needed:
        raise SystemExit(
            f"{needed >> 20} MB of free disk are needed under {root}, only {free >> 20} are free"
        )
    refs = []
    for seed in range(count):
        ref, data = objects.make(seed)
        path = root / ref.object_key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        refs.append(ref)
    return refs
