"""How many engines a keeper asks for, on a clock that the tests move."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from registry.errors import Overloaded, Unavailable
from server.pool.control_files import WantedEngines, wanted_file
from server.pool.keeper import (
    MAX_DECISIONS,
    Keeper,
)
from server.pool.pool_settings import PoolSettings
from server.pool.running import Running, RunningRequest

CONFIG = PoolSettings(
    model="base", sleep_after_s=60.0, wake_timeout_s=10.0, max_waiting=4, max_queue_share=0.5
)


def request(request_id="r"):
    return RunningRequest(request_id, "ten", 1, 9, is_cold=False, engine="engine")


class World:
    """A keeper, its pool and its clock."""

    def __init__(self, folder, config=CONFIG):
        self.now_s = 0.0
        self.engines = SimpleNamespace(is_ready=True, figures=lambda: [])
        self.running = Running()
        self.home = folder
        self.home.mkdir(exist_ok=True)
        self.keeper = Keeper(self.engines, self.running, self.home, config, lambda: self.now_s)

    @property
    def wanted(self):
        return wanted_file(self.home).read()

    def pass_time(self, seconds):
        self.now_s += seconds
        self.keeper.turn()

    def fall_asleep(self):
        """Pass the time after which it sleeps, and end its engines."""
        self.pass_time(60)
        self.engines.is_ready = False

    def wake(self):
        """Have a request wait until it may go on, which takes a second at most."""

        async def ask():
            waiting = asyncio.create_task(self.keeper.wake("ten"))
            await asyncio.sleep(0)
            self.now_s += 0 if waiting.done() else 1
            await waiting

        asyncio.run(ask())


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "home")


def test_a_pool_that_never_rests_leaves_the_number_to_the_placer(tmp_path):
    world = World(tmp_path / "home", replace(CONFIG, sleep_after_s=None))
    world.pass_time(10_000)
    assert world.wanted is None
    assert world.keeper.state == "awake"


def test_a_model_sleeps_when_nobody_asked_for_as_long_as_is_set(world):
    world.pass_time(59)
    assert world.wanted is None
    world.pass_time(1)
    assert (world.wanted, world.keeper.state) == (0, "asleep")


def test_a_request_under_way_keeps_it_awake_and_the_time_counts_from_its_end(world):
    begun = request()
    world.running.add(begun)
    world.running.begin(begun, 0)
    world.pass_time(500)
    assert world.keeper.state == "awake"
    world.running.remove(world.running.find("r"))
    world.pass_time(59)
    assert world.keeper.state == "awake"
    world.pass_time(1)
    assert world.keeper.state == "asleep"


def test_a_request_on_its_way_keeps_the_engines_and_a_refused_one_does_not_keep_it_awake(world):
    with world.keeper.visit():
        world.pass_time(60)
        assert (world.keeper.state, world.wanted) == ("asleep", None)
    world.pass_time(1)
    assert world.wanted == 0


def test_a_request_for_which_engines_stayed_does_not_wait_for_them(world):
    world.pass_time(60)
    world.wake()
    with world.keeper.visit():
        world.pass_time(61)
        assert (world.keeper.state, world.wanted) == ("asleep", 1)
        asyncio.run(asyncio.wait_for(world.keeper.wake("ten"), 5))  # the clock stands still
        assert not world.keeper.is_resting


def test_a_request_that_is_admitted_while_the_model_falls_asleep_finds_it_awake(world):
    with world.keeper.visit():
        world.running.add(request())
        world.pass_time(60)
        world.keeper.note_admitted()
    assert not world.keeper.is_resting
    world.pass_time(59)
    assert (world.keeper.state, world.wanted) == ("awake", None)


def test_a_request_wakes_it_at_once_and_is_told_when_to_come_again(world):
    world.fall_asleep()

    async def ask():
        waking = asyncio.create_task(world.keeper.wake("ten"))
        await asyncio.sleep(0)
        assert world.wanted == 1
        world.now_s += CONFIG.wake_timeout_s
        await waking

    with pytest.raises(Unavailable, match="base had gone to sleep") as refused:
        asyncio.run(ask())
    assert refused.value.retry_after_s == 20.0


def test_a_waiting_request_goes_on_when_an_engine_is_there_and_the_next_is_told_better(world):
    world.fall_asleep()

    async def ask():
        waking = asyncio.create_task(world.keeper.wake("ten"))
        await asyncio.sleep(0)
        world.now_s += 4
        world.engines.is_ready = True
        await waking

    asyncio.run(ask())
    world.fall_asleep()
    impatient = replace(CONFIG, wake_timeout_s=0.0)
    world.keeper._waking._settings = impatient
    with pytest.raises(Unavailable, match="base had gone to sleep") as refused:
        asyncio.run(world.keeper.wake("ten"))
    assert refused.value.retry_after_s == 4.0


async def test_a_request_waits_for_a_model_that_was_closed_and_opened_as_for_one_that_woke(world):
    world.keeper.close()
    world.pass_time(1)
    world.engines.is_ready = False
    world.keeper.open()
    waiting = asyncio.create_task(world.keeper.wake("ten"))
    await asyncio.sleep(0)
    assert not waiting.done()
    world.now_s += 4
    world.engines.is_ready = True
    await waiting


async def test_a_model_for_which_requests_wait_does_not_fall_asleep(tmp_path):
    world = World(tmp_path / "home", replace(CONFIG, wake_timeout_s=100.0))
    world.fall_asleep()
    waiting = asyncio.create_task(world.keeper.wake("ten"))
    await asyncio.sleep(0)
    world.pass_time(61)
    assert world.keeper.state == "awake"
    world.engines.is_ready = True
    await waiting


@pytest.mark.parametrize("goes", [True, False])
async def test_an_engine_that_may_have_been_told_to_go_is_doubted_for_a_moment(world, goes):
    world.pass_time(60)
    assert world.wanted == 0
    waiting = asyncio.create_task(world.keeper.wake("ten"))
    await asyncio.sleep(0)
    assert not waiting.done()
    world.engines.is_ready = not goes
    world.now_s += 1
    if goes:
        await asyncio.sleep(0.1)
        assert not waiting.done()
        world.engines.is_ready = True
    await waiting


def test_how_long_a_start_took_is_known_although_nobody_waited_for_it(world):
    world.keeper._waking._settings = replace(CONFIG, wake_timeout_s=0.0)
    world.fall_asleep()
    with pytest.raises(Unavailable, match="base had gone to sleep"):
        asyncio.run(world.keeper.wake("ten"))
    world.now_s += 6
    world.engines.is_ready = True
    world.pass_time(0)
    world.fall_asleep()
    with pytest.raises(Unavailable, match="base had gone to sleep") as refused:
        asyncio.run(world.keeper.wake("ten"))
    assert refused.value.retry_after_s == 6.0


async def test_a_tenant_has_its_share_of_those_that_wait(world):
    world.fall_asleep()
    waiting = [asyncio.create_task(world.keeper.wake("greedy")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await world.keeper.wake("greedy")
    waiting += [asyncio.create_task(world.keeper.wake("other")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await world.keeper.wake("third")
    world.engines.is_ready = True
    await asyncio.gather(*waiting)
    await world.keeper.wake("greedy")


def test_a_closed_pool_keeps_its_engines_until_its_last_request_has_ended(world):
    world.running.add(request())
    world.keeper.close()
    world.pass_time(5)
    assert world.wanted is None
    with pytest.raises(Unavailable, match="drained"), world.keeper.visit():
        raise AssertionError
    world.running.remove(world.running.find("r"))
    world.pass_time(1)
    assert world.wanted == 0
    world.keeper.open()
    world.pass_time(1)
    assert world.wanted == 1


def test_a_pool_with_a_successor_takes_requests_that_chose_it_before_and_then_goes(world):
    world.pass_time(20)
    world.keeper.succeed()
    world.pass_time(4)
    world.keeper.succeed()
    begun = request()
    with world.keeper.visit():
        world.running.add(begun)
    world.running.begin(begun, 0)
    world.pass_time(30)
    assert (world.wanted, world.keeper.state) == (None, "awake")
    world.running.remove(world.running.find("r"))
    world.pass_time(4)
    assert world.keeper.state == "awake"
    world.pass_time(1)
    assert (world.wanted, world.keeper.state) == (0, "closed")


def test_a_gateway_that_starts_again_finds_the_pool_asleep(tmp_path):
    (tmp_path / "home").mkdir()
    wanted_file(tmp_path / "home").write(0)
    assert World(tmp_path / "home").keeper.state == "asleep"
    awake = World(tmp_path / "home", replace(CONFIG, sleep_after_s=None))
    awake.pass_time(1)
    assert awake.wanted == 1


def test_a_gateway_that_starts_goes_on_with_the_number_that_was_wanted(tmp_path):
    (tmp_path / "home").mkdir()
    wanted_file(tmp_path / "home").write(3)
    world = World(tmp_path / "home", PoolSettings(model="base", max_engines=4))
    world.pass_time(1)
    assert world.wanted == 3


class AnySequence(RuleBasedStateMachine):
    """Requests come and go, time passes, an operator opens and closes."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(Path(self.folder.name) / "home")
        self.number = 0

    def teardown(self):
        self.folder.cleanup()

    @rule(seconds=st.integers(0, 90))
    def time_passes(self, seconds):
        self.world.pass_time(seconds)

    @precondition(lambda self: self.world.keeper.state != "closed")
    @rule()
    def a_request_begins(self):
        with self.world.keeper.visit():
            self.world.wake()
            self.number += 1
            self.world.running.add(request(str(self.number)))

    @precondition(lambda self: len(self.world.running))
    @rule(data=st.data())
    def a_request_ends(self, data):
        ended = data.draw(st.sampled_from(list(self.world.running)))
        self.world.running.remove(self.world.running.find(ended))

    @rule()
    def the_operator_closes(self):
        self.world.keeper.close()

    @rule()
    def a_successor_comes(self):
        self.world.keeper.succeed()

    @rule()
    def the_operator_opens(self):
        self.world.keeper.open()
        self.world.keeper.turn()

    @invariant()
    def no_request_under_way_loses_its_engines(self):
        if len(self.world.running):
            assert self.world.wanted != 0


AnySequence.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestAnySequence = AnySequence.TestCase


def test_of_several_gateways_the_one_that_wants_most_decides_and_one_that_leaves_wants_nothing(
    tmp_path,
):
    home = tmp_path / "home"
    several = replace(CONFIG, gateways=2)
    idle = World(home, several)
    engines = SimpleNamespace(is_ready=True, figures=lambda: [])
    running, begun = Running(), request()
    busy = Keeper(engines, running, home, several, lambda: idle.now_s, number=2)
    running.add(begun)
    running.begin(begun, 0)
    for seconds in (1, 60):
        idle.pass_time(seconds)
        busy.turn()
    assert idle.keeper.state == "asleep"
    assert WantedEngines(home).latest() == 1, "the other one has a request under way"
    busy.leave()
    assert WantedEngines(home).latest() == 0
    assert Keeper(engines, running, home, several, number=3).state == "asleep"


# ---- what is kept of decisions ----


def decisions(world):
    return [(it.num_engines, it.reason) for it in world.keeper.decisions]


def test_each_change_of_the_number_is_kept_with_its_reason(world):
    world.pass_time(60)
    assert decisions(world) == [(0, "nobody asked for it for 60 s")]
    world.wake()
    assert decisions(world)[0] == (1, "a request woke it")
    world.keeper.close()
    world.pass_time(1)
    world.pass_time(1)
    assert decisions(world)[0] == (0, "it is called off")
    world.keeper.open()
    world.pass_time(1)
    assert decisions(world)[0] == (1, "it serves again")
    world.keeper.succeed()
    world.pass_time(10)
    assert decisions(world)[0] == (0, "a successor takes its requests")
    assert len(decisions(world)) == 5


def test_only_the_last_decisions_are_kept(world):
    for _ in range(MAX_DECISIONS):
        world.keeper.close()
        world.pass_time(1)
        world.keeper.open()
        world.pass_time(1)
    assert len(decisions(world)) == MAX_DECISIONS
    assert decisions(world)[0] == (1, "it serves again")
