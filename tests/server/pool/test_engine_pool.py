"""A gateway's engine pool, with real engine processes around fake runners."""

import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from engine.endpoint import Endpoint
from engine.errors import EngineAwayError, EngineDeadError, EngineDied
from engine.messages import ForgetDrafts, TenantService
from server.pool.engine import PooledEngine
from server.pool.engine_pool import TURN_S, EnginePool
from server.pool.files import Member
from server.pool.load_costs import LoadCosts
from server.pool.prefix_table import CHUNK_TOKENS, marks_of
from server.pool.running import Running, RunningRequest
from server.pool.suspects import Suspected, fingerprint
from tests.engine.fakes import expected_tokens, make_adapter, make_message
from tests.engine.pulled_outputs import outputs_of
from tests.engine.test_process import start_engine, write_config

READY_S = 60.0


class Pool:
    """Engine processes by name, and a gateway's EnginePool of them."""

    def __init__(self, folder):
        self.folder = folder
        self.members = []
        self.processes = {}
        self.running = Running()
        self.engines = EnginePool(
            lambda: tuple(self.members), "", "base-1", self.running, lambda: None, lambda _: None
        )

    def start(self, *names, step_s=0.0, **changes):
        for name in names:
            directory = self.folder / name
            directory.mkdir(exist_ok=True)
            self.processes[name] = start_engine(write_config(directory, **changes), step_s)
            member = Member(name, Endpoint.of_socket(directory / "engine" / "engine.sock").address)
            if member not in self.members:
                self.members.append(member)

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait()

    async def ask(self, message):
        """Run a request; return the name of its engine and its tokens."""
        name = self.engines.route(message)
        asked = RunningRequest(message.request_id, message.tenant_id, 1, 1, False, name)
        self.running.add(asked)
        try:
            outputs = [output async for output in outputs_of(self.engines, message, name)]
        finally:
            self.running.remove(asked)
        return name, [token for output in outputs for token in output.new_token_ids]

    def states(self):
        return {figures.name: figures.state for figures in self.engines.figures()}

    async def wait(self, condition, timeout_s=READY_S):
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, self.states()
            await asyncio.sleep(0.02)

    async def wait_ready(self, *names):
        await self.wait(lambda: all(self.states().get(name) == "ready" for name in names))


@pytest.fixture
def pool(tmp_path):
    pool = Pool(tmp_path)
    yield pool
    for name in pool.processes:
        pool.kill(name)


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory):
    """The engines a and b, which outlive the tests that end none of them."""
    pool = Pool(tmp_path_factory.mktemp("two"))
    pool.start("a", "b", step_s=0.01)
    yield pool
    for name in pool.processes:
        pool.kill(name)


@pytest.fixture
def pair(two_engines):
    """A gateway of its own for the test, on the two engines."""
    pool = Pool(two_engines.folder)
    pool.members = list(two_engines.members)
    return pool


@asynccontextmanager
async def gateway(pool, *names):
    await pool.engines.start()
    try:
        await pool.wait_ready(*names)
        yield pool.engines
    finally:
        await pool.engines.close()


async def test_requests_at_once_are_spread_and_each_gets_its_own_tokens(pair):
    async with gateway(pair, "a", "b"):
        messages = [make_message(f"r{i}", 5 + i, 30) for i in range(20)]
        answers = await asyncio.gather(*map(pair.ask, messages))
        assert [tokens for _, tokens in answers] == [expected_tokens(m) for m in messages]
        counts = [[name for name, _ in answers].count(name) for name in ("a", "b")]
        assert min(counts) >= 8, counts


async def test_requests_on_an_adapter_go_where_it_is(pair):
    async with gateway(pair, "a", "b"):
        adapters = [make_adapter(f"ad{n}") for n in range(12)]
        homes = {}
        for turn in range(3):
            for adapter in adapters:
                message = make_message(f"r{turn}-{adapter.adapter_id}", 5, 3, adapter)
                name, _ = await pair.ask(message)
                assert homes.setdefault(adapter.object_key, name) == name
        assert set(homes.values()) == {"a", "b"}


async def test_a_long_prompt_goes_where_its_beginning_was_computed(pool):
    pool.start("a", "b")
    async with gateway(pool, "a", "b"):
        prompts = [tuple([first] * 4 * CHUNK_TOKENS) for first in range(5, 15)]

        async def ask(turn, number):
            message = make_message(f"r{turn}-{number}", 1, 1)
            prompt = (*prompts[number], turn + 1)
            return (await pool.ask(replace(message, prompt_token_ids=prompt)))[0]

        # The first turns are sent at once, so that they are spread; later ones one by one.
        homes = await asyncio.gather(*(ask(0, number) for number in range(len(prompts))))
        assert set(homes) == {"a", "b"}
        for turn in (1, 2):
            assert [await ask(turn, number) for number in range(len(prompts))] == homes


async def test_a_killed_engine_ends_its_own_requests_only_and_comes_back_with_nothing_cached(pool):
    pool.start("a", "b", step_s=0.02)
    long = replace(make_message("long", 1, 1), prompt_token_ids=tuple([7] * 4 * CHUNK_TOKENS))

    def cached():
        return pool.engines._prefixes.cached_tokens(marks_of(long))

    async with gateway(pool, "a", "b"):
        name, _ = await pool.ask(long)
        (other,) = {"a", "b"} - {name}
        assert cached() == {name: 4 * CHUNK_TOKENS}
        messages = [make_message(f"r{i}", 5, 60) for i in range(12)]
        asked = [asyncio.create_task(pool.ask(message)) for message in messages]
        await asyncio.sleep(0.3)
        lost = [r for r in pool.running if pool.running.find(r).engine == name]
        assert 0 < len(lost) < 12
        pool.kill(name)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for message, answer in zip(messages, answers, strict=True):
            if message.request_id in lost:
                assert isinstance(answer, EngineDeadError)
            else:
                assert answer[1] == expected_tokens(message)
        assert pool.engines.num_deaths == 1
        assert pool.states()[name] == "starting"
        await pool.wait(lambda: not cached())
        assert {pool.engines.route(make_message(f"n{i}")) for i in range(20)} == {other}
        pool.start(name)
        await pool.wait_ready(name)


async def test_an_engine_that_leaves_ends_what_it_has_and_is_no_death(pool):
    pool.start("a", "b", step_s=0.02)
    async with gateway(pool, "a", "b") as engines:
        messages = [make_message(f"r{i}", 5, 60) for i in range(8)]
        asked = [asyncio.create_task(pool.ask(message)) for message in messages]
        await pool.wait(lambda: pool.running.num_at("a"))
        pool.processes["a"].terminate()
        await pool.wait(lambda: pool.states()["a"] == "leaving")
        assert {engines.route(make_message(f"n{i}")) for i in range(20)} == {"b"}
        answers = await asyncio.gather(*asked)
        assert [tokens for _, tokens in answers] == [expected_tokens(m) for m in messages]
        source = engines.engine_id("a")
        ends = await engines.read_journal(source, 0, 100)
        await engines.read_journal(source, ends.last_seq, 100)
        await pool.wait(lambda: pool.states()["a"] == "starting")
        assert pool.processes["a"].wait(5) == 0
        assert engines.num_deaths == 0


async def test_requests_wait_while_the_only_engine_proves_an_adapter_alone(pool, tmp_path):
    pool.start("a", step_s=0.05)
    path = tmp_path / "object"
    path.write_bytes(b"a")
    adapter = make_adapter("a")
    message = make_message("r1", 5, 3)
    async with gateway(pool, "a") as engines:
        proving = asyncio.create_task(engines.prove(adapter, path, alone=True))
        await pool.wait(lambda: (stats := engines.figures()[0].stats) and stats.running)
        assert (await pool.ask(message))[1] == expected_tokens(message)
        assert proving.done()
        assert proving.result().verdict == "passed"


async def test_who_was_not_there_did_not_die_of_a_request_and_another_is_named_for_it(pool):
    pool.start("a", "b")
    message = make_message("r1", 5, 3)
    async with gateway(pool, "a", "b") as engines:
        for gone, other in (("a", "b"), ("b", "a")):
            assert {engines.route(make_message(f"n{i}"), gone) for i in range(9)} == {other}
        pool.kill("a")
        await pool.wait(lambda: pool.states()["a"] != "ready")
        for _ in range(3):  # two deaths would make it a suspect
            with pytest.raises(EngineAwayError):
                await anext(outputs_of(engines, message, "a"))
        with pytest.raises(EngineAwayError):
            await anext(outputs_of(engines, message, "never met"))
        assert await pool.ask(message) == ("b", expected_tokens(message))
        with pytest.raises(EngineAwayError):
            engines.route(message, "b")


async def test_who_joins_is_met_and_who_is_gone_is_forgotten(pool):
    pool.start("a")
    async with gateway(pool, "a") as engines:
        first = engines.engine_ids()
        assert engines.route(make_message("r1")) == "a"
        pool.start("b")
        await pool.wait_ready("b")
        assert {engines.route(make_message(f"s{i}")) for i in range(20)} == {"a", "b"}
        both = set(engines.engine_ids())
        assert both > set(first)
        pool.members.pop(0)
        await pool.wait(lambda: pool.states() == {"b": "ready"})
        assert set(engines.engine_ids()) == both - set(first)
        with pytest.raises(EngineDeadError):
            engines.engine_id("a")
        with pytest.raises(EngineDeadError):
            await engines.read_journal(first[0], 0, 10)
        pool.members.clear()
        await pool.wait(lambda: pool.states() == {})
        assert engines.max_model_len == 512, "what they could take is remembered"


async def test_what_stands_in_for_an_engine_that_is_gone_says_nothing_of_lengths(pool):
    pool.start("a")
    async with gateway(pool, "a") as engines:
        await asyncio.sleep(TURN_S * 2)
        pool.kill("a")
        # An engine's length may not be among its settings, as it depends on its memory.
        config = pool.folder / "a" / "engine.json"
        known = '"max_model_len": 512'
        config.write_text(config.read_text().replace(known, '"max_model_len": null'))
        pool.processes["a"] = subprocess.Popen([sys.executable, "-m", "engine.retired", config])
        await pool.wait(lambda: pool.states() == {"a": "leaving"})
        assert engines.max_model_len == 512


async def test_each_journal_is_read_from_its_own_engine(pool):
    pool.start("a", "b")
    async with gateway(pool, "a", "b") as engines:
        went = {}
        for number in range(6):
            message = make_message(f"r{number}", 5, 2)
            went[message.request_id], _ = await pool.ask(message)
        found = {}
        for engine_id in engines.engine_ids():
            records = (await engines.read_journal(engine_id, 0, 100)).records
            found |= {r.request_id: engine_id for r in records}
        assert found == {id: engines.engine_id(name) for id, name in went.items()}


async def test_an_engine_of_another_model_gets_no_requests(pool):
    pool.start("a")
    pool.start("b", max_num_seqs=2)
    other = pool.folder / "c"
    other.mkdir()
    config = write_config(other)
    other_model = config.read_text().replace('"base-1"', '"base-2"')
    config.write_text(other_model.replace('"max_model_len": 512', '"max_model_len": 256'))
    pool.processes["c"] = start_engine(config)
    pool.members.append(Member("c", Endpoint.of_socket(other / "engine" / "engine.sock").address))
    async with gateway(pool, "a", "b") as engines:
        await pool.wait(lambda: pool.states()["c"] == "of another model")
        assert {engines.route(make_message(f"r{i}")) for i in range(30)} == {"a", "b"}
        assert len(engines.welcomes) == 2
        assert engines.max_model_len == 512, "the other model's limit does not count"


async def test_each_pin_is_kept_at_one_engine_the_same_for_every_gateway(pool):
    pool.start("a", "b")
    adapters = [make_adapter(f"ad{n}") for n in range(8)]

    def homes():
        return {residency.object_key: name for name, residency in pool.engines.all_residency()}

    async with gateway(pool, "a", "b") as engines:
        await engines.pin(adapters)
        await pool.wait(lambda: len(homes()) == 8)
        before = homes()
        assert set(before.values()) == {"a", "b"}
        await engines.pin(list(reversed(adapters)))
        await asyncio.sleep(2 * TURN_S)
        assert homes() == before
        assert len(engines.all_residency()) == 8


def test_every_engine_is_told_to_forget_drafts(pool):
    told = []

    async def note(name, message):
        told.append((name, message))

    for name in ("a", "b"):
        client = SimpleNamespace(tell=partial(note, name))
        engine = PooledEngine(Member(name, ""), client, "base-1", LoadCosts(), lambda _: 0)
        pool.engines._engines[name] = engine

    asyncio.run(pool.engines.forget_drafts("acme", "digest"))
    message = ForgetDrafts(tenant_id="acme", adapter_digest="digest")
    assert told == [("a", message), ("b", message)]


async def test_service_of_one_engine_is_told_to_the_other_and_not_to_itself(pool):
    pool.start("a", "b")
    told = []

    async def note(name, message):
        assert isinstance(message, TenantService)
        told.append((name, message))

    async with gateway(pool, "a", "b") as engines:
        for name, engine in engines._engines.items():
            engine.client.tell = lambda m, n=name: note(n, m)
        message = make_message("r1", 5, 4)
        name, _ = await pool.ask(message)
        source = engines.engine_id(name)
        others = {"a", "b"} - {name}

        def arrived():
            return {n for n, m in told if m.engine_id == source} == others

        await pool.wait(arrived)
        (totals,) = {m.totals for _, m in told if m.engine_id == source and m.totals}
        assert dict(totals)[message.tenant_id] > 0


def suspect_it(engines, message):
    for death in "xy":
        watch = engines.suspects.watch(fingerprint(message), "t", "gone")
        with suppress(EngineDied), watch:
            raise EngineDied(death)


def poison_of(name):
    return replace(make_message(name, 5, 3), prompt_token_ids=(3, 3, 3))


async def test_a_request_that_killed_an_engine_alone_is_not_tried_at_a_fourth(pool):
    pool.start("a", "b", "c", "d")
    async with gateway(pool, "a", "b", "c", "d") as engines:
        for number in range(3):
            with pytest.raises(EngineDied):
                await pool.ask(poison_of(f"r{number}"))
        with pytest.raises(Suspected) as refused:
            await pool.ask(poison_of("r3"))
        assert refused.value.retry_after_s is None
        assert list(pool.states().values()).count("ready") == 1
        (suspect,) = engines.suspects.all()
        assert (suspect.state, len(suspect.deaths)) == ("refused", 3)


async def test_a_suspect_waits_for_an_engine_that_serves_nobody_else_and_others_go_elsewhere(pool):
    pool.start("a", "b", step_s=0.02)
    suspect = make_message("s", 5, 3)
    async with gateway(pool, "a", "b") as engines:
        suspect_it(engines, suspect)
        others = [asyncio.create_task(pool.ask(make_message(f"r{i}", 5, 40))) for i in range(4)]
        await pool.wait(lambda: pool.running.num_at("a") and pool.running.num_at("b"))
        asked = asyncio.create_task(pool.ask(suspect))
        await pool.wait(lambda: engines.suspects.trial)
        trial = engines.suspects.trial
        routed = {engines.route(make_message(f"n{i}")) for i in range(9)}
        assert routed == {"a", "b"} - {trial}
        assert not asked.done()
        with pytest.raises(Suspected) as busy:
            await pool.ask(replace(suspect, request_id="again"))
        assert busy.value.retry_after_s
        assert await asked == (trial, expected_tokens(suspect))
        assert all(other.done() for other in others if other.result()[0] == trial)
        assert engines.suspects.all() == []


async def test_a_suspect_for_which_no_engine_is_free_in_time_is_sent_again_later(pool):
    pool.start("a", step_s=0.05)
    suspect = replace(make_message("s", 5, 3), first_token_timeout_s=0.2)
    async with gateway(pool, "a") as engines:
        suspect_it(engines, suspect)
        other = asyncio.create_task(pool.ask(make_message("r", 5, 40)))
        await pool.wait(lambda: pool.running.num_at("a"))
        with pytest.raises(Suspected):
            await pool.ask(suspect)
        assert engines.suspects.trial is None
        await other
