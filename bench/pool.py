"""`python -m bench.pool`: three real engines and more adapters than fit: loads under the product's
routing and random routing.

Both get the very same requests at the same times, alternately, on fresh engines with empty caches.
The lower bound is one load of each adapter, at an engine that has room for it: all arenas together
hold all adapters, one arena does not. The engines share one disk, so routing hardly changes how
much comes from the store.
"""

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.adapters.objects import RandomObjects
from bench.adapters.s3_server import STORAGE_URL, slow_s3
from bench.adapters.tiers import TARGETS, Tiers, fetching, slabs_of
from bench.in_process import BASE_REVISION, DEVICE, DTYPE_NAME, THREADS, EngineFactory
from bench.measurement import Figures, Measurement, main
from bench.product import started
from bench.report import percentiles_ms, ratio, rounded
from engine.config import EngineConfig
from engine.messages import AddRequest, EngineStats, RequestOutput, SamplingParams
from engine.wire import write_vocabulary
from registry.ref import AdapterRef
from server.pool.engine_pool import EnginePool
from server.pool.files import Member
from server.pool.running import Running, RunningRequest

_TENANTS = 4
_FOREVER_S = 600.0
_READY_S = 120.0
_FRESH_S = 10.0
_LOOK_S = 0.02
_SIDES = ("product", "random")

Due = tuple[float, AddRequest]
"""The time at which a request is due, in seconds from the start of a run, and the request."""
Answered = tuple[float, float, str]
"""The time at which a request was due, the time to its first token, its engine's name."""


@dataclass(frozen=True, kw_only=True)
class Real(Measurement):
    """Adapter loads of real engines, under the product's routing and random routing.

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

    def measure(self, folder: Path) -> Figures:
        factory = EngineFactory(self.stack, folder)
        objects = RandomObjects(factory.layout.shape, self.rank, TARGETS[self.targets])
        rounds = []
        with slow_s3(self.store_delay_s) as s3:
            refs = objects.put(s3, self.adapters)
            for number in range(self.rounds):
                due = list(self._requests(factory, refs, self.seed + number))
                rounds.append({s: self._run(factory, s3.environment, due, s) for s in _SIDES})
        ratios = {
            name: [ratio(one["product"][name], one["random"][name]) for one in rounds]
            for name in ("fetched", "placed")
        }
        return {side: [one[side] for one in rounds] for side in _SIDES} | {
            "to_random": {name: median(values) for name, values in ratios.items()},
            "to_random_of_each": ratios,
        }

    def _requests(
        self, factory: EngineFactory, refs: Sequence[AdapterRef], seed: int
    ) -> Iterator[Due]:
        stream, at_s = random.Random(seed), 0.0
        weights = list(itertools.accumulate(1 / (n + 1) for n in range(self.adapters)))
        for number in itertools.count():
            at_s += stream.expovariate(self.rate)
            if at_s > self.warm_up_s + self.measured_s:
                return
            (adapter,) = stream.choices(range(self.adapters), cum_weights=weights)
            max_tokens = stream.randint(*self.output_tokens)
            prompt = factory.random_tokens(stream, stream.randint(*self.prompt_tokens))
            yield (
                at_s,
                AddRequest(
                    request_id=f"{seed}-{number}",
                    tenant_id=f"tenant-{adapter % _TENANTS}",
                    prompt_token_ids=prompt,
                    sampling_params=SamplingParams(
                        max_tokens=max_tokens, temperature=0.0, ignore_eos=True
                    ),
                    token_lease=max_tokens,
                    deadline_s=_FOREVER_S,
                    first_token_timeout_s=_FOREVER_S,
                    adapter=refs[adapter],
                ),
            )

    def _run(
        self, factory: EngineFactory, environment: Mapping[str, str], due: Sequence[Due], side: str
    ) -> Figures:
        layout = factory.layout
        adapter_slabs = slabs_of(layout, self.rank, TARGETS[self.targets])
        longest = self.prompt_tokens[1] + self.output_tokens[1]
        kv_slabs = self.max_num_seqs * layout.num_blocks(longest)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            quota_bytes = self.disk_holds * adapter_slabs * layout.slab_bytes
            tiers = stack.enter_context(
                fetching(folder, STORAGE_URL, quota_bytes=quota_bytes, environment=environment)
            )
            members = stack.enter_context(
                _engine_processes(
                    folder,
                    factory,
                    tiers,
                    self.engines,
                    arena_bytes=(self.resident * adapter_slabs + kv_slabs) * layout.slab_bytes,
                    max_model_len=longest,
                    max_num_seqs=self.max_num_seqs,
                )
            )
            return asyncio.run(self._measure(_PoolClient(members), due, side))

    async def _measure(self, client: "_PoolClient", due: Sequence[Due], side: str) -> Figures:
        await client.start()
        try:
            chance = random.Random(self.seed)
            choose = client.route if side == "product" else lambda _: chance.choice(client.names)
            sending = asyncio.create_task(client.send(due, choose))
            await asyncio.sleep(self.warm_up_s)
            before = await client.fresh_stats()
            answers = [answer for answer in await sending if answer[0] >= self.warm_up_s]
            after = await client.fresh_stats()
        finally:
            await client.close()
        by_engine = Counter(name for _, _, name in answers)
        return {
            "requests": len(answers),
            "fetched": _grown(before, after, "disk", "loads"),
            "placed": _grown(before, after, "device", "loads"),
            "placed_bytes": _grown(before, after, "device", "load_bytes"),
            "ttft_ms": percentiles_ms(ttft_s for _, ttft_s, _ in answers),
            "max_to_mean_load": rounded(max(by_engine.values()) * len(after) / len(answers)),
        }


def _grown(
    before: Mapping[str, EngineStats], after: Mapping[str, EngineStats], tier: str, name: str
) -> int:
    """Return how much a figure of a tier has grown, at all engines."""
    return sum(
        getattr(new, name) - getattr(old, name)
        for engine, stats in after.items()
        for new, old in zip(stats.tiers, before[engine].tiers, strict=True)
        if new.tier == tier
    )


class _PoolClient:
    """A gateway without HTTP, limits and billing: it routes, prefetches, generates, takes times.

    The run is over as soon as a request ends other than by its length.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.names = [member.name for member in members]
        self._running = Running()
        self._engines = EnginePool(
            lambda: members,
            "",
            BASE_REVISION,
            self._running,
            on_end=lambda: None,
            on_lease_low=lambda _: None,
        )
        self.route = self._engines.route

    async def start(self) -> None:
        await self._engines.start()
        await _until(lambda: len(self._engines.welcomes) == len(self.names), _READY_S)

    async def close(self) -> None:
        await self._engines.close()

    async def send(
        self, requests: Sequence[Due], choose: Callable[[AddRequest], str]
    ) -> list[Answered]:
        """Send each request when it is due, however many are still under way."""
        start_s = time.perf_counter()
        return await asyncio.gather(*(self._answer(*due, choose, start_s) for due in requests))

    async def fresh_stats(self) -> dict[str, EngineStats]:
        """Wait for figures that engines make from now on; return them by engine."""
        old = self._stats()
        await _until(
            lambda: all(stats is not old.get(name) for name, stats in self._stats().items()),
            _FRESH_S,
        )
        return self._stats()

    def _stats(self) -> dict[str, EngineStats]:
        return {one.name: one.stats for one in self._engines.figures() if one.stats}

    async def _answer(
        self, at_s: float, message: AddRequest, choose: Callable[[AddRequest], str], start_s: float
    ) -> Answered:
        await asyncio.sleep(start_s + at_s - time.perf_counter())
        name = choose(message)
        request = RunningRequest(
            request_id=message.request_id,
            tenant_id=message.tenant_id,
            num_answers=1,
            wanted_tokens=message.token_lease,
            is_cold=False,
            engine=name,
        )
        self._running.add(request)
        token_s: list[float] = []

        def note(output: RequestOutput) -> None:
            if output.new_token_ids:
                token_s.append(time.perf_counter() - start_s)
            if output.is_last and output.finish_reason != "length":
                raise RuntimeError(f"a request failed: {output.stop_cause} {output.error}")

        try:
            assert message.adapter
            await self._engines.prefetch(message.tenant_id, message.adapter, name)
            await self._engines.generate(message, name, note)
        finally:
            self._running.remove(request)
        return at_s, token_s[0] - at_s, name


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise SystemExit("the engines did not answer in time; their logs say why")
        await asyncio.sleep(_LOOK_S)


@contextmanager
def _engine_processes(
    folder: Path, factory: EngineFactory, tiers: Tiers, count: int, **settings: Any
) -> Iterator[list[Member]]:
    """Start engines as `chorale serve` starts them. They may still be starting.

    folder: holds all their files; exists and is empty.   settings: fields of EngineConfig.
    """
    vocabulary = folder / "vocabulary"
    write_vocabulary(vocabulary, [b"%d " % token for token in range(factory.vocab_size)])
    with ExitStack() as stack:
        members = []
        for number in range(1, count + 1):
            name = f"engine-{number}"
            config = EngineConfig(
                data_dir=str(folder / name),
                model_dir=str(factory.model_dir),
                base_revision=BASE_REVISION,
                vocabulary_path=str(vocabulary),
                eos_token_ids=(0,),
                adapter_cache_dir=str(tiers.cache),
                fetcher_socket=str(tiers.socket),
                device=DEVICE,
                dtype=DTYPE_NAME,
                threads=THREADS,
                swap_bytes=0,
                speculation="off",  # random models repeat themselves
                **settings,
            )
            (folder / name).mkdir()
            path = folder / f"{name}.json"
            path.write_text(json.dumps(asdict(config)))
            command = (sys.executable, "-m", "engine", str(path))
            environment = {"OMP_NUM_THREADS": str(THREADS)}
            stack.enter_context(started(command, folder / f"{name}.log", environment))
            members.append(Member(name=name, address=f"ipc://{folder / name / 'engine.sock'}"))
        yield members


if __name__ == "__main__":
    main("bench.pool", {"pool.real": Real()}, __doc__)
