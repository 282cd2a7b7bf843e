"""The replay takes the same steps as the engine's scheduler, and plans fit into its arena."""

import random
from collections.abc import Mapping, Sequence
from itertools import groupby

import pytest

from bench.in_process import EngineFactory
from bench.session import Ask, Session
from engine.core import EngineCore
from engine.steps.batch import Batch
from server.capacity.arena import Limits, make_arena
from server.capacity.hardware import Hardware
from server.capacity.replay import Replay, Seats
from server.capacity.sizes import ModelSizes, find_sizes
from server.capacity.steps import StepLoad
from server.capacity.traffic import Request

CPU = Hardware("tiny machine", "cpu", 8 << 30, 1e9, 1e9, 1e9, 0.0)
SEATS, BUDGET = 6, 48


class CountedTimes:
    """A stand-in for StepTimes: every step takes a second, and is noted."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.pairs: list[float] = []

    def parts(self, load: StepLoad) -> dict[str, float]:
        self.steps.append((load.num_tokens, load.num_choosing))
        self.pairs.append(load.num_pairs)
        return {"products": 1.0}


class Watched:
    """An engine's runner that notes the size of each batch."""

    def __init__(self, core: EngineCore) -> None:
        self.runner, self.lag, self.meter = core.runner, core.runner.lag, core.runner.meter
        self.steps: list[tuple[int, int]] = []

    def launch(self, batch: Batch) -> None:
        chosen = sum(row.sampling is not None for row in batch.rows)
        self.steps.append((batch.num_tokens, chosen))
        self.runner.launch(batch)

    def choose(self, masks: Mapping[int, Sequence[object]]) -> None:
        self.runner.choose(masks)  # type: ignore[arg-type]

    def collect(self) -> object:
        return self.runner.collect()


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> EngineFactory:
    return EngineFactory.of("tiny", tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def model(factory: EngineFactory) -> ModelSizes:
    return find_sizes(str(factory.model_dir))


def make_core(factory: EngineFactory, arena_tokens: int) -> EngineCore:
    return factory.make(
        arena_tokens=arena_tokens,
        max_model_len=512,
        max_num_seqs=SEATS,
        max_num_batched_tokens=BUDGET,
        prefix_caching=False,
        cpu_kernels="torch",
    )


def serve(core: EngineCore, requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Serve requests that come at once; return the sizes of the steps."""
    stream = random.Random(7)
    watched = Watched(core)
    core.runner = watched  # type: ignore[assignment]
    session = Session(core)
    for request in requests:
        tokens = tuple(stream.randrange(300) for _ in range(request.num_prompt))
        session.send(Ask(tokens, request.num_output))
    while session.num_open:
        session.step()
    assert all(outcome.error is None for outcome in session.outcomes())
    return watched.steps


def replay(core: EngineCore, requests: Sequence[Request]) -> tuple[Replay, CountedTimes]:
    times = CountedTimes()
    seats = Seats(SEATS, BUDGET, core.scheduler.arena.num_slabs, core.scheduler.layout.block_size)
    return Replay(times, seats, requests), times  # type: ignore[arg-type]


def changes(steps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [step for step, _ in groupby(steps)]


@pytest.mark.parametrize("seed", range(2))
def test_the_replay_takes_the_steps_of_the_engine(factory: EngineFactory, seed: int) -> None:
    stream = random.Random(seed)
    requests = [
        Request(stream.randint(1, 120), stream.randint(1, 20), arrival_s=0.0) for _ in range(15)
    ]
    core = make_core(factory, arena_tokens=4096)
    replayed, times = replay(core, requests)
    result = replayed.run()
    steps = serve(core, requests)
    assert result.num_steps == len(steps)
    assert changes(times.steps) == changes(steps)
    assert len(result.served) == len(requests)


def test_requests_that_outgrow_the_arena_are_computed_again_in_both(
    factory: EngineFactory,
) -> None:
    requests = [Request(100, 100, arrival_s=0.0) for _ in range(4)]
    core = make_core(factory, arena_tokens=640)
    replayed, _ = replay(core, requests)
    result = replayed.run()
    steps = serve(core, requests)
    assert result.num_preemptions > 0
    assert core.scheduler.queues.num_preemptions > 0
    assert result.num_steps == pytest.approx(len(steps), rel=0.1)


def test_as_many_requests_as_planned_fit_into_the_engines_own_arena(
    factory: EngineFactory, model: ModelSizes
) -> None:
    core = make_core(factory, arena_tokens=1000)
    slabs = core.scheduler.arena.num_slabs
    layout = core.scheduler.layout
    limits = Limits(SEATS, BUDGET, arena_bytes=slabs * layout.slab_bytes + layout.slab_bytes // 2)
    arena = make_arena(model, CPU, "float", 1, limits, 0)
    assert (arena.num_slabs, arena.layout.slab_bytes) == (slabs, layout.slab_bytes)
    assert arena.layout == layout
    count = arena.most_requests(250, 0)
    # The last token of an answer is chosen and not computed, so it needs no room.
    requests = [Request(150, 101, arrival_s=0.0) for _ in range(count + 1)]
    assert 1 < count < SEATS
    serve(core, requests[:count])
    assert core.scheduler.queues.num_preemptions == 0
    serve(core, requests)
    assert core.scheduler.queues.num_preemptions > 0


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_take_the_bytes_that_the_engine_counts(
    factory: EngineFactory, model: ModelSizes, quantization: str | None
) -> None:
    core = factory.make(
        arena_tokens=1000, max_model_len=512, quantization=quantization, cpu_kernels="torch"
    )
    planned = model.weight_bytes(quantization or "float", 4)  # type: ignore[arg-type]
    if quantization:
        # The model is tied: its rounded head is one more copy, which the engine does not count.
        planned -= model.head_bytes(quantization, 4)  # type: ignore[arg-type]
    assert core.runner.model.weight_bytes == planned  # type: ignore[attr-defined]


def test_a_token_meets_itself_and_all_before_it() -> None:
    times = CountedTimes()
    requests = [Request(5, 4, arrival_s=0.0), Request(1, 1, arrival_s=3.5)]
    Replay(times, Seats(SEATS, 3, 100, 16), requests).run()  # type: ignore[arg-type]
    assert times.pairs == [1 + 2 + 3, 4 + 5, 6, 7, 8 + 1]


@pytest.mark.parametrize(("adapters", "at_once"), [((0, 1, 2), 1), ((0, 0, 0), 3)])
def test_requests_on_one_adapter_share_its_slabs(adapters: tuple[int, ...], at_once: int) -> None:
    requests = [Request(8, 4, adapter, 8, 0.0) for adapter in adapters]
    seats = Seats(SEATS, BUDGET, 5, 16, adapter_slabs=2)
    result = Replay(CountedTimes(), seats, requests).run()  # type: ignore[arg-type]
    assert (len(result.served), result.most_running) == (3, at_once)


def test_a_request_passed_over_for_its_rank_lets_others_go_first() -> None:
    requests = [Request(16, 40, number, 64, 0.0) for number in range(3)]
    requests.append(Request(16, 40, 0, 64, 0.0))
    times = CountedTimes()
    seats = Seats(SEATS, BUDGET, 100, 16, adapter_slabs=2, sum_ranks=128)
    result = Replay(times, seats, requests).run()  # type: ignore[arg-type]
    assert result.waited["ranks"] > 0
    assert [r.number for r in result.served] == [0, 1, 3, 2]
