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
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench.adapters.loading_session import LoadingSession
from bench.adapters.objects import RandomObjects
from bench.adapters.tiers import TARGETS, Tiers, fetching, slabs_of
from bench.in_process import EngineFactory, EngineMeasurement
from bench.measurement import Figures, in_turns
from bench.report import percentiles_ms, ratio, rounded
from bench.session import Ask
from bench.step_log import StepLog
from engine.wire.messages import EngineStats
from registry.ref import AdapterRef

_ROOM = 2
"""Free disk needed, as a multiple of all objects' bytes: the objects and their packed files."""


@dataclass(frozen=True, kw_only=True)
class Count(EngineMeasurement):
    """Speed by the number of registered adapters, of which the n-th is requested in proportion to
    1 / n.

    counts: how many adapters are registered, run by run.   compared: the count whose run
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

    def run(self, factory: EngineFactory) -> Figures:
        assert self.clients <= self.resident, "every request may need a name of its own"
        objects = RandomObjects(factory.layout.shape, self.rank, TARGETS[self.targets])
        store = factory.folder / "objects"
        refs = _register(objects, max(*self.counts, self.resident), store)
        quota_bytes = shutil.disk_usage(factory.folder).free // 2
        with fetching(factory.folder, store.as_uri(), quota_bytes=quota_bytes) as tiers:
            run = partial(self._run, factory, tiers, refs)
            few = min(self.counts)
            fewest, compared, renamed = in_turns(
                self.repeats,
                partial(run, few),
                partial(run, self.compared),
                partial(run, self.compared, is_renamed=True),
            )
            known = {few: _median_of(fewest), self.compared: _median_of(compared)}
            return {
                "compared_to_renamed": _ratios(compared, renamed),
                "compared_to_fewest": _ratios(compared, fewest),
                "renamed": _median_of(renamed),
                "zipf": {str(count): known.get(count) or run(count) for count in self.counts},
            }

    def _run(
        self,
        factory: EngineFactory,
        tiers: Tiers,
        refs: Sequence[AdapterRef],
        count: int,
        *,
        is_renamed: bool = False,
    ) -> Figures:
        """Return the figures of a run with a fresh engine and an empty disk cache."""
        tiers.forget()
        longest = self.prompt_tokens[1] + self.output_tokens[1]
        adapter_slabs = slabs_of(factory.layout, self.rank, TARGETS[self.targets])
        core = tiers.make_core(
            factory,
            num_slabs=self.resident * adapter_slabs
            + self.max_num_seqs * factory.layout.num_blocks(longest),
            max_model_len=longest,
            max_num_seqs=self.max_num_seqs,
            max_pinned_share=1.0,
        )
        log, session = StepLog.of(core), LoadingSession(core)
        names: _Own = _Own(refs)
        if is_renamed:
            session.pin(refs[: self.resident])
            names = _Renamed(refs[: self.resident])
        clients = _Clients(self, factory, session, names, count)
        clients.serve(self.warm_up)
        before, begun = core.take_stats(), (len(log.steps), log.num_rows, log.num_adapters)
        start_s = time.perf_counter()
        ttft_s = clients.serve(self.requests)
        seconds, after = time.perf_counter() - start_s, core.take_stats()
        ended = (len(log.steps), log.num_rows, log.num_adapters)
        steps, rows, adapters = (b - a for a, b in zip(begun, ended, strict=True))
        num_tokens = after.completion_tokens - before.completion_tokens
        return {
            "output_tokens_per_s": rounded(num_tokens / seconds),
            "requests_per_s": rounded(self.requests / seconds),
            "ttft_ms": percentiles_ms(ttft_s),
            "distinct_adapters_per_step": rounded(adapters / steps),
            "requests_per_step": rounded(rows / steps),
            "hit_rate": {t: _hit_rate(before, after, t) for t in ("device", "host", "disk")},
            "fetched": _grown(before, after, "disk", "loads"),
            "placed": _grown(before, after, "device", "loads"),
            "evictions": after.adapter_evictions - before.adapter_evictions,
            "preemptions": after.preemptions - before.preemptions,
        }


class _Own:
    """The names that requests give for their adapters: each adapter's own."""

    def __init__(self, refs: Sequence[AdapterRef]) -> None:
        self._refs = refs

    def take(self, number: int) -> AdapterRef:
        return self._refs[number]

    def give_back(self, number: int) -> None:
        """Note that a request has ended."""


class _Renamed(_Own):
    """An adapter goes by the name of a resident adapter, which no other adapter uses as long as it
    has a request in the system.
    """

    def __init__(self, residents: Sequence[AdapterRef]) -> None:
        self._free = deque(residents)
        self._names: dict[int, AdapterRef] = {}
        self._num_users: Counter[int] = Counter()

    def take(self, number: int) -> AdapterRef:
        if number not in self._names:
            self._names[number] = self._free.popleft()
        self._num_users[number] += 1
        return self._names[number]

    def give_back(self, number: int) -> None:
        self._num_users[number] -= 1
        if not self._num_users[number]:
            self._free.append(self._names.pop(number))


class _Clients:
    """Closed loop of `plan.clients` clients; the plan's seed alone decides their requests."""

    def __init__(
        self,
        plan: Count,
        factory: EngineFactory,
        session: LoadingSession,
        names: _Own,
        count: int,
    ) -> None:
        self._plan, self._factory, self._session, self._names = plan, factory, session, names
        self._numbers = range(count)
        self._weights = list(itertools.accumulate(1 / (number + 1) for number in range(count)))
        self._random = random.Random(plan.seed)
        self._open: dict[int, int] = {}
        self._sent_s: dict[int, float] = {}

    def serve(self, num_requests: int) -> list[float]:
        """Serve until `num_requests` have ended; requests that are open then stay open. Returns the
        seconds to each first token that came.
        """
        session, num_ended = self._session, 0
        ttft_s: list[float] = []
        while num_ended < num_requests:
            while len(self._open) < self._plan.clients:
                self._send()
            session.step()
            begun = [i for i in self._sent_s if session.num_tokens(i)]
            ttft_s += [session.now_s() - self._sent_s.pop(i) for i in begun]
            for index in [i for i in self._open if not session.is_open(i)]:
                if error := session.outcome(index).error:
                    raise SystemExit(f"a request failed: {error}")
                self._names.give_back(self._open.pop(index))
                num_ended += 1
        return ttft_s

    def _send(self) -> None:
        plan, stream = self._plan, self._random
        (number,) = stream.choices(self._numbers, cum_weights=self._weights)
        ask = Ask(
            self._factory.random_tokens(stream, stream.randint(*plan.prompt_tokens)),
            stream.randint(*plan.output_tokens),
            tenant_id=f"tenant-{number % plan.tenants}",
            adapter=self._names.take(number),
        )
        sent_s = self._session.now_s()
        index = self._session.send(ask)
        self._open[index], self._sent_s[index] = number, sent_s


def _grown(before: EngineStats, after: EngineStats, tier: str, name: str) -> int:
    old, new = (next(t for t in stats.tiers if t.tier == tier) for stats in (before, after))
    return getattr(new, name) - getattr(old, name)


def _hit_rate(before: EngineStats, after: EngineStats, tier: str) -> float | None:
    """Hits as a share of the lookups in a tier; None if there were none."""
    hits, misses = (_grown(before, after, tier, name) for name in ("hits", "misses"))
    return rounded(hits / (hits + misses)) if hits + misses else None


def _ratios(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Figures:
    """Ratios of throughputs, turn by turn, and their median."""
    speeds = [[run["output_tokens_per_s"] for run in runs] for runs in (ours, theirs)]
    of_each = [ratio(a, b) for a, b in zip(*speeds, strict=True)]
    return {"median": median(of_each), "of_each": of_each}


def _median_of(runs: Sequence[Figures]) -> Figures:
    """The figures of the run whose throughput is the median, and the throughput of each."""
    in_order = sorted(runs, key=lambda run: run["output_tokens_per_s"])
    speeds = [run["output_tokens_per_s"] for run in runs]
    return in_order[len(runs) // 2] | {"output_tokens_per_s_of_each": speeds}


def _register(objects: RandomObjects, count: int, root: Path) -> list[AdapterRef]:
    """Write objects under `root` where LocalStorage keeps them, without its sync of each."""
    needed = _ROOM * count * objects.size_bytes
    free = shutil.disk_usage(root.parent).free
    if free < needed:
        raise SystemExit(f"{needed >> 20} MB are needed under {root}, {free >> 20} are free")
    refs = []
    for seed in range(count):
        ref, data = objects.make(seed)
        path = root / ref.object_key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        refs.append(ref)
    return refs
