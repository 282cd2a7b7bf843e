"""Effect of a storm of cold loads on running streams; the S3 server takes 200 ms for every answer.

    quiet | prefetches | quiet | requests | warm requests        and again, one round after another

`prefetches` load adapters onto disk, packed: nothing but fetching is measured, against the quiet
phases before and after. `requests` load adapters on into the arena and generate one token each, so
their steps compute more than the streams' own; `warm requests` are as many at the same steps, for
adapters that are in the arena. Adapters are cold because there are more of them than all caches
hold. The bound is what the loader shares with the engine: the GIL and the memory bus.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from bench.adapters.engine_loop import EngineLoop
from bench.adapters.objects import RandomObjects
from bench.adapters.phase import Phase
from bench.adapters.s3_server import STORAGE_URL, slow_s3
from bench.adapters.shapes import TARGETS, slabs_of
from bench.adapters.tiers import Tiers, fetching
from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import rate, rounded
from engine.core import EngineCore
from registry.ref import AdapterRef

_COLD_TOKENS = 4  # tokens in the prompt of a request for a cold adapter
_PREFILL_STEPS = 16  # upper bound on steps until the last stream's prompt is computed


@dataclass(frozen=True, kw_only=True)
class Storm(Experiment):
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

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        objects = RandomObjects(factory.layout.shape, self.rank, TARGETS[self.targets])
        with ExitStack() as stack:
            s3 = stack.enter_context(slow_s3(self.store_delay_s))
            refs = []
            for number in range(self.streams + self.at_once + self.cold):
                ref, data = objects.make(number)
                s3.put(ref.object_key, data)
                refs.append(ref)
            packed_bytes = self._adapter_slabs(factory) * factory.layout.slab_bytes
            quota_bytes = self.disk_holds * (packed_bytes + objects.size_bytes)
            tiers = stack.enter_context(
                fetching(
                    factory.folder, STORAGE_URL, quota_bytes=quota_bytes, environment=s3.environment
                )
            )
            return self._measure(factory, tiers, refs)

    def _measure(
        self, factory: EngineFactory, tiers: Tiers, refs: Sequence[AdapterRef]
    ) -> dict[str, Any]:
        pinned, cold = refs[: -self.cold], refs[-self.cold :]
        engine = EngineLoop(self._make_core(factory, tiers))
        engine.pin(tuple(pinned))
        phases = _Phases(self, factory, engine, pinned, cold)
        rounds = [phases.round() for _ in range(self.rounds)]
        return {
            "prefetches": _summary(
                [(a["prefetches"], (a["quiet_before"], a["quiet_after"])) for a in rounds]
            ),
            "requests": _summary([(a["requests"], (a["warm_requests"],)) for a in rounds]),
            "quiet_spread": _spread([(a["quiet_before"], a["quiet_after"]) for a in rounds]),
        }

    def _make_core(self, factory: EngineFactory, tiers: Tiers) -> EngineCore:
        longest = self.prompt_tokens + self.stream_tokens
        slabs = self._adapter_slabs(factory)
        kv_slabs = self.streams * factory.layout.num_blocks(longest)
        # Room for the pinned adapters, and for each load under way: an adapter and a KV block.
        num_slabs = kv_slabs + (self.streams + self.at_once) * slabs + self.at_once * (slabs + 1)
        return tiers.make_core(
            factory,
            num_slabs=num_slabs,
            max_model_len=longest,
            max_num_seqs=self.streams + self.at_once,
            prefetch_per_tenant=self.at_once,
            max_pinned_share=1.0,
        )

    def _adapter_slabs(self, factory: EngineFactory) -> int:
        return slabs_of(factory.layout, self.rank, TARGETS[self.targets])

    @property
    def stream_tokens(self) -> int:
        """Upper bound on the tokens a stream generates before it is aborted."""
        return _PREFILL_STEPS + self.lead_steps + self.steps


class _Phases:
    """Streams with and without a storm on one engine."""

    def __init__(
        self,
        plan: Storm,
        factory: EngineFactory,
        engine: EngineLoop,
        pinned: Sequence[AdapterRef],
        cold: Sequence[AdapterRef],
    ) -> None:
        self.plan, self.factory, self.engine = plan, factory, engine
        self._streams, self._warm = pinned[: plan.streams], pinned[plan.streams :]
        self._next_cold: Iterator[AdapterRef] = itertools.cycle(cold)
        self._coming: list[AdapterRef] = []
        self._random = random.Random(plan.seed)

    def round(self) -> dict[str, Phase]:
        phases = {
            "quiet_before": self._run(lambda step: None),
            "prefetches": self._run(self._storm(self.engine.prefetch)),
            "quiet_after": self._run(lambda step: None),
            "requests": self._run(self._storm(self._ask)),
        }
        phases["warm_requests"] = self._run(self._replay(phases["requests"].num_rows))
        return phases

    def _run(self, before_step: Callable[[int], None]) -> Phase:
        """Runs one phase. before_step: sends what arrives before a step; it gets the step's number,
        from -lead_steps on.
        """
        streams = self._start_streams()
        for step in range(-self.plan.lead_steps, 0):
            before_step(step)
            self.engine.step()
        phase = self._measure(before_step)
        self.engine.abort(streams)
        self.engine.step_until(self._is_over)
        return phase

    def _measure(self, before_step: Callable[[int], None]) -> Phase:
        phase = Phase(self.engine)
        for step in range(self.plan.steps):
            before_step(step)
            phase.step()
        phase.end()
        assert min(phase.num_rows) >= self.plan.streams, "a stream had no token in a step"
        assert self.engine.core.scheduler.queues.num_preemptions == 0, "the arena is too small"
        return phase

    def _start_streams(self) -> list[str]:
        """Starts the streams and returns their ids once all of them decode."""
        plan, log = self.plan, self.engine.log
        before = log.last.step
        started = [
            self.engine.send(
                adapter,
                self.factory.random_tokens(self._random, plan.prompt_tokens),
                plan.stream_tokens,
            )
            for adapter in self._streams
        ]
        self.engine.step_until(
            lambda: (
                log.last.step > before and len(log.last.rows) == log.last.num_tokens == plan.streams
            )
        )
        return started

    def _storm(self, send: Callable[[AdapterRef], object]) -> Callable[[int], None]:
        """Return a function that, before each step, sends loads until `at_once` are under way."""

        def before_step(step: int) -> None:
            entries = self.engine.adapters.entries
            self._coming = [ref for ref in self._coming if entries[ref.object_key].is_wanted]
            for ref in itertools.islice(self._next_cold, self.plan.at_once - len(self._coming)):
                send(ref)
                self._coming.append(ref)

        return before_step

    def _replay(self, num_rows: Sequence[int]) -> Callable[[int], None]:
        def before_step(step: int) -> None:
            num_others = num_rows[step] - self.plan.streams if step >= 0 else 0
            for adapter in self._warm[:num_others]:
                self._ask(adapter)

        return before_step

    def _ask(self, adapter: AdapterRef) -> None:
        """Asks for one token."""
        self.engine.send(adapter, self.factory.random_tokens(self._random, _COLD_TOKENS), 1)

    def _is_over(self) -> bool:
        entries = self.engine.adapters.entries
        wanted = [r for r in self._coming if entries[r.object_key].is_wanted]
        failed = [e.failure for e in entries.values() if e.tier == "failed"]
        if failed:
            raise SystemExit(f"a load failed: {failed[0]}")
        return not wanted and not self.engine.core.scheduler.has_work


_Pair = tuple[Phase, Sequence[Phase]]
"""A storm's phase, and the phases it is compared with."""


def _summary(pairs: Sequence[_Pair]) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within a round."""
    storms, beside = [storm for storm, _ in pairs], [p for _, phases in pairs for p in phases]
    ratios = [_ratios(storm, phases) for storm, phases in pairs]
    seconds = sum(storm.seconds for storm in storms)
    return {
        "storm": _medians([phase.figures() | phase.waits() for phase in storms]),
        "beside": _medians([phase.figures() | phase.waits() for phase in beside]),
        "storm_to_beside": _medians(ratios),
        "itl_p99_to_beside_of_each": [one["itl_p99_ms"] for one in ratios],
        "loads": sum(storm.loads for storm in storms),
        "loads_per_s": rate(sum(storm.loads for storm in storms), seconds),
        "load_bytes_per_s": rate(sum(storm.load_bytes for storm in storms), seconds),
        "requests_per_step": rounded(mean(n for storm in storms for n in storm.num_rows)),
        "children_cpu_s": _sums([storm.children_cpu_s for storm in storms]),
        "seconds": rounded(seconds),
    }


def _ratios(storm: Phase, beside: Sequence[Phase]) -> dict[str, float]:
    figures = [phase.figures() for phase in beside]
    return {
        name: rounded(value / mean(other[name] for other in figures))
        for name, value in storm.figures().items()
    }


def _spread(pairs: Sequence[tuple[Phase, Phase]]) -> dict[str, float]:
    """Difference between the two quiet phases of a round, as a share of their mean; medians."""
    spreads = []
    for one, other in pairs:
        a, b = one.figures(), other.figures()
        spreads.append(
            {name: rounded(2 * abs(a[name] - b[name]) / (a[name] + b[name])) for name in a}
        )
    return _medians(spreads)


def _medians(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: rounded(median(one[name] for one in figures)) for name in figures[0]}


def _sums(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: rounded(sum(one.get(name, 0.0) for one in figures)) for name in figures[0]}
