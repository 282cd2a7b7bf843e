"""Effect of a storm of cold loads on running streams; the store takes 200 ms for every answer.

    quiet | storm | quiet        and again, one round after another

The storm loads adapters onto disk, packed: nothing but fetching is measured, against the quiet
phases before and after. Adapters are cold because there are more of them than all caches hold. The
bound is what the loader shares with the engine: the GIL and the memory bus.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from bench.adapters.loading_session import LoadingSession
from bench.adapters.objects import RandomObjects
from bench.adapters.s3_server import STORAGE_URL, slow_s3
from bench.adapters.tiers import TARGETS, Tiers, fetching, slabs_of
from bench.in_process import EngineFactory, EngineMeasurement
from bench.measurement import Figures
from bench.report import rate, rounded
from bench.session import Ask
from bench.step_log import StepLog
from engine.core import EngineCore
from registry.ref import AdapterRef

_PREFILL_STEPS = 16  # upper bound on steps until the last stream's prompt is computed


@dataclass(frozen=True, kw_only=True)
class Storm(EngineMeasurement):
    """The effect of many cold loads at once on running streams.

    steps: steps measured in a phase, after `lead_steps` like them.   at_once: number of cold
    loads under way.   cold: adapters that are loaded in turn.   disk_holds: adapters that fit into
    the disk cache.   Each stream has a pinned adapter of its own.
    """

    stack: str = "smollm2-135m"
    rank: int = 8
    targets: str = "q,v"
    streams: int = 8
    prompt_tokens: int = 32
    lead_steps: int = 8
    steps: int = 150
    rounds: int = 5
    at_once: int = 20
    cold: int = 128
    disk_holds: int = 32
    store_delay_s: float = 0.2
    seed: int = 0

    def run(self, factory: EngineFactory) -> Figures:
        objects = RandomObjects(factory.layout.shape, self.rank, TARGETS[self.targets])
        packed_bytes = self._adapter_slabs(factory) * factory.layout.slab_bytes
        with ExitStack() as stack:
            s3 = stack.enter_context(slow_s3(self.store_delay_s))
            refs = objects.put(s3, self.streams + self.cold)
            tiers = stack.enter_context(
                fetching(
                    factory.folder,
                    STORAGE_URL,
                    quota_bytes=self.disk_holds * (packed_bytes + objects.size_bytes),
                    environment=s3.environment,
                )
            )
            phases = _Phases(self, factory, self._make_core(factory, tiers), refs)
            rounds = [
                (phases.run(has_storm=False), phases.run(has_storm=True), phases.run(False))
                for _ in range(self.rounds)
            ]
        return {"prefetches": _summary(rounds)}

    def _make_core(self, factory: EngineFactory, tiers: Tiers) -> EngineCore:
        longest = self.prompt_tokens + self.stream_tokens
        kv_slabs = self.streams * factory.layout.num_blocks(longest)
        return tiers.make_core(
            factory,
            num_slabs=kv_slabs + (self.streams + self.at_once) * self._adapter_slabs(factory),
            max_model_len=longest,
            max_num_seqs=self.streams,
            prefetch_per_tenant=self.at_once,
            max_pinned_share=1.0,
        )

    def _adapter_slabs(self, factory: EngineFactory) -> int:
        return slabs_of(factory.layout, self.rank, TARGETS[self.targets])

    @property
    def stream_tokens(self) -> int:
        """Upper bound on the tokens a stream generates before it is aborted."""
        return _PREFILL_STEPS + self.lead_steps + self.steps


@dataclass(frozen=True)
class _Phase:
    """Times of one phase, step by step; loads: adapters fetched onto disk meanwhile."""

    itl_s: Sequence[float]
    step_cpu_s: Sequence[float]
    loads: int

    def figures(self) -> dict[str, float]:
        """Figures of the phase; itl: from the end of one step to the end of the next."""
        p50_s, p99_s = np.percentile(self.itl_s, (50, 99))
        return {
            "itl_p50_ms": rounded(p50_s * 1000),
            "itl_p99_ms": rounded(p99_s * 1000),
            "step_cpu_ms": rounded(mean(self.step_cpu_s) * 1000),
        }


class _Phases:
    """Streams with and without a storm on one engine."""

    def __init__(
        self, plan: Storm, factory: EngineFactory, core: EngineCore, refs: Sequence[AdapterRef]
    ) -> None:
        self._plan, self._factory, self._core = plan, factory, core
        self._log = StepLog.of(core)
        self._pinned = refs[: plan.streams]
        LoadingSession(core).pin(self._pinned)
        self._next_cold: Iterator[AdapterRef] = itertools.cycle(refs[plan.streams :])
        self._coming: list[AdapterRef] = []
        self._random = random.Random(plan.seed)

    def run(self, has_storm: bool) -> _Phase:
        plan, session = self._plan, LoadingSession(self._core)
        for adapter in self._pinned:
            prompt = self._factory.random_tokens(self._random, plan.prompt_tokens)
            session.send(Ask(prompt, plan.stream_tokens, adapter=adapter))
        session.step_until(lambda: all(map(session.num_tokens, range(plan.streams))))
        for _ in range(plan.lead_steps):
            self._step(session, has_storm)
        itl_s, step_cpu_s = [], []
        before, last = self._core.adapters.counts.disk.loads, time.perf_counter()
        for _ in range(plan.steps):
            step_cpu_s.append(self._step(session, has_storm))
            now = time.perf_counter()
            itl_s.append(now - last)
            last = now
            assert len(self._log.last.rows) == plan.streams, "a stream had no token in a step"
        loads = self._core.adapters.counts.disk.loads - before
        session.stop()
        session.step_until(lambda: not self._still_coming())
        return _Phase(itl_s, step_cpu_s, loads)

    def _step(self, session: LoadingSession, has_storm: bool) -> float:
        """Step, with `at_once` loads under way in a storm. Returns the thread's seconds."""
        if has_storm:
            self._coming = self._still_coming()
            for ref in itertools.islice(self._next_cold, self._plan.at_once - len(self._coming)):
                session.prefetch(ref)
                self._coming.append(ref)
        start_s = time.thread_time()
        session.step()
        return time.thread_time() - start_s

    def _still_coming(self) -> list[AdapterRef]:
        entries = self._core.adapters.entries
        if failed := [e.failure for e in entries.values() if e.tier == "failed"]:
            raise SystemExit(f"a load failed: {failed[0]}")
        return [ref for ref in self._coming if entries[ref.object_key].is_wanted]


def _summary(rounds: Sequence[tuple[_Phase, _Phase, _Phase]]) -> Figures:
    """Medians over the rounds; ratios are taken within a round."""
    storms = [storm for _, storm, _ in rounds]
    loads, seconds = sum(s.loads for s in storms), sum(sum(s.itl_s) for s in storms)
    ratios = [
        {
            name: rounded(value / mean(quiet.figures()[name] for quiet in (before, after)))
            for name, value in storm.figures().items()
        }
        for before, storm, after in rounds
    ]
    beside = [quiet for before, _, after in rounds for quiet in (before, after)]
    return {
        "storm": _medians([storm.figures() for storm in storms]),
        "beside": _medians([quiet.figures() for quiet in beside]),
        "storm_to_beside": _medians(ratios),
        "loads": loads,
        "loads_per_s": rate(loads, seconds),
    }


def _medians(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: rounded(median(one[name] for one in figures)) for name in figures[0]}
