"""Three real engines and more adapters than fit: loads under the product's and random routing.

Both get the very same requests at the same times, alternately, on fresh engines with empty caches.
The lower bound is one load of each adapter, at an engine that has room for it: all arenas together
hold all adapters, one arena does not. The engines share one disk, so routing hardly changes how
much comes from the store.
"""

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.adapters.objects import RandomObjects
from bench.adapters.s3_server import STORAGE_URL, slow_s3
from bench.adapters.shapes import TARGETS, slabs_of
from bench.adapters.tiers import BASE_REVISION, Tiers, fetching
from bench.billing.measurement import Measurement
from bench.in_process import EngineFactory
from bench.pool.client import Answered, Due, PoolClient
from bench.pool.processes import engine_processes
from bench.pool.traffic import Traffic
from bench.report import percentiles_ms, ratio, rounded
from engine.messages import AddRequest, EngineStats, SamplingParams
from registry.ref import AdapterRef

_TENANTS = 4
_FOREVER_S = 600.0
_SIDES = ("product", "random")


@dataclass(frozen=True, kw_only=True)
class Real(Measurement):
    """Adapter loads of three real engines, under the product's routing and random routing.

    resident: adapters that an engine's arena holds beside the KV of its seats.

    disk_holds: adapters that fit into the machine's disk cache.   store_delay_s: wait before every
    answer of the store.   rate: requests per second in all, Poisson; adapter n is asked for in
    proportion to 1 / (n + 1).   warm_up_s: beginning of a run, not measured.   rounds: runs of each
    side.
    """

    stack: str = "small-5m"
    engines: int = 3
    max_num_seqs: int = 8
    adapters: int = 48
    resident: int = 16
    disk_holds: int = 40
    rank: int = 8
    targets: str = "all"
    store_delay_s: float = 0.05
    rate: float = 8.0
    prompt_tokens: tuple[int, int] = (16, 48)
    output_tokens: tuple[int, int] = (16, 48)
    warm_up_s: float = 30.0
    measured_s: float = 60.0
    rounds: int = 3
    seed: int = 0

    def measure(self, folder: Path) -> dict[str, Any]:
        factory = EngineFactory(self.stack, folder)
        objects = RandomObjects(factory.layout.shape, self.rank, TARGETS[self.targets])
        rounds: list[dict[str, _Run]] = []
        with slow_s3(self.store_delay_s) as s3:
            refs = []
            for number in range(self.adapters):
                ref, data = objects.make(number)
                s3.put(ref.object_key, data)
                refs.append(ref)
            for number in range(self.rounds):
                due = self._requests(factory, refs, number)
                rounds.append(
                    {side: self._run(factory, s3.environment, due, side) for side in _SIDES}
                )
        return _summary(rounds)

    def _requests(
        self, factory: EngineFactory, refs: Sequence[AdapterRef], round_number: int
    ) -> list[Due]:
        traffic = Traffic(
            adapters=self.adapters,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
        )
        seed = self.seed + round_number
        arrivals = traffic.arrivals(self.rate, self.warm_up_s + self.measured_s, seed)
        return [
            Due(
                arrival.at_s,
                AddRequest(
                    request_id=f"{seed}-{arrival.number}",
                    tenant_id=f"tenant-{arrival.adapter % _TENANTS}",
                    prompt_token_ids=factory.random_tokens(
                        random.Random(f"{seed}/{arrival.number}"), arrival.prompt_tokens
                    ),
                    sampling_params=SamplingParams(
                        max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True
                    ),
                    token_lease=arrival.output_tokens,
                    deadline_s=_FOREVER_S,
                    first_token_timeout_s=_FOREVER_S,
                    adapter=refs[arrival.adapter],
                ),
            )
            for arrival in arrivals
            if arrival.adapter is not None
        ]

    def _run(
        self, factory: EngineFactory, environment: dict[str, str], due: Sequence[Due], side: str
    ) -> "_Run":
        layout = factory.layout
        adapter_slabs = slabs_of(layout, self.rank, TARGETS[self.targets])
        longest = self.prompt_tokens[1] + self.output_tokens[1]
        kv_slabs = self.max_num_seqs * layout.num_blocks(longest)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            adapter_bytes = adapter_slabs * layout.slab_bytes
            tiers: Tiers = stack.enter_context(
                fetching(
                    folder,
                    STORAGE_URL,
                    quota_bytes=self.disk_holds * adapter_bytes,
                    environment=environment,
                )
            )
            members = stack.enter_context(
                engine_processes(
                    folder,
                    factory,
                    tiers,
                    self.engines,
                    arena_bytes=(self.resident * adapter_slabs + kv_slabs) * layout.slab_bytes,
                    max_model_len=longest,
                    max_num_seqs=self.max_num_seqs,
                )
            )
            client = PoolClient(members, BASE_REVISION)
            return asyncio.run(self._measure(client, due, side))

    async def _measure(self, client: PoolClient, due: Sequence[Due], side: str) -> "_Run":
        await client.start()
        try:
            choose = client.chooser(side, self.seed)
            sending = asyncio.create_task(client.send(due, choose))
            await asyncio.sleep(self.warm_up_s)
            before = await client.fresh_stats()
            answers = await sending
            after = await client.fresh_stats()
        finally:
            await client.close()
        measured = [answer for answer in answers if answer.at_s >= self.warm_up_s]
        return _Run(measured, before, after)


@dataclass(frozen=True)
class _Run:
    """Measurements of one run.

    answers: answered requests that were due in the measured time.   before, after: figures by
    engine at its start and end.
    """

    answers: Sequence[Answered]
    before: dict[str, EngineStats]
    after: dict[str, EngineStats]

    def loads(self, tier: str) -> int:
        """Number of loads into this tier, at all engines."""
        return self._grown(tier, "loads")

    def figures(self) -> dict[str, Any]:
        requests = Counter(answer.engine for answer in self.answers)
        return {
            "requests": len(self.answers),
            "fetched": self.loads("disk"),
            "placed": self.loads("device"),
            "placed_bytes": self._grown("device", "load_bytes"),
            "ttft_ms": percentiles_ms(answer.ttft_s for answer in self.answers),
            "max_to_mean_load": rounded(
                max(requests.values()) * len(self.after) / len(self.answers)
            ),
        }

    def _grown(self, tier: str, name: str) -> int:
        return sum(
            getattr(new, name) - getattr(old, name)
            for engine, stats in self.after.items()
            for new, old in zip(stats.tiers, self.before[engine].tiers, strict=True)
            if new.tier == tier
        )


def _summary(rounds: Sequence[dict[str, _Run]]) -> dict[str, Any]:
    """Return the figures of all runs, and ratios, which are taken within a round."""
    ratios = {
        name: [ratio(one["product"].loads(tier), one["random"].loads(tier)) for one in rounds]
        for name, tier in (("fetched", "disk"), ("placed", "device"))
    }
    return {side: [one[side].figures() for one in rounds] for side in _SIDES} | {
        "to_random": {name: median(values) for name, values in ratios.items()},
        "to_random_of_each": ratios,
    }
