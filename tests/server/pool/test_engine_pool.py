"""A gateway's engine pool: with real engine processes around fake runners, and with clients that
do what the test says.
"""

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from engine.errors import EngineAwayError, EngineDeadError, EngineDied
from engine.wire.client import EngineClient
from engine.wire.endpoint import Endpoint
from engine.wire.messages import (
    EngineStats,
    ForgetDrafts,
    RequestOutput,
    Residency,
    TenantService,
    Welcome,
)
from server.pool.control_files import Member
from server.pool.engine_pool import EnginePool
from server.pool.prefix_table import CHUNK_TOKENS, marks_of
from server.pool.running import Running, RunningRequest
from server.pool.suspects import Suspected, fingerprint
from tests.engine.fakes import expected_tokens, make_adapter, make_message
from tests.engine.test_process import outputs_of, start_engine, write_config

READY_S = 60.0


class Pool:
    """Engine processes by name, and a gateway's EnginePool of them."""

    def __init__(self, folder):
        self.folder = folder
        self.members = []
        self.processes = {}
        self.running = Running()
        self.engines = EnginePool(
            lambda: tuple(self.members),
            self.connect,
            "base-1",
            self.running.num_at,
            lambda *_: None,
        )

    def connect(self, member, on_lease_low, on_service):
        return EngineClient(member.endpoint, on_lease_low=on_lease_low, on_service=on_service)

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
        engine = self.engines.route(message)
        asked = RunningRequest(message.request_id, message.tenant_id, 1, 1, False, engine.name)
        self.running.add(asked)
        try:
            outputs = [output async for output in outputs_of(engine, message)]
        finally:
            self.running.remove(asked)
        return engine.name, [token for output in outputs for token in output.new_token_ids]

    def routed(self, besides=None):
        """The names of the engines that many requests would go to."""
        messages = [make_message(f"n{i}") for i in range(20)]
        return {self.engines.route(message, besides).name for message in messages}

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


@asynccontextmanager
async def gateway(pool, *names):
    await pool.engines.start()
    try:
        await pool.wait_ready(*names)
        yield pool.engines
    finally:
        await pool.engines.close()


async def test_a_killed_engine_ends_its_own_requests_only_and_comes_back_with_nothing_cached(pool):
    pool.start("a", "b", step_s=0.02)
    long = make_message("long", 1, 1, prompt=[7] * 4 * CHUNK_TOKENS)

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
        assert pool.routed() == {other}
        pool.start(name)
        await pool.wait_ready(name)


async def test_an_engine_that_leaves_ends_what_it_has_and_is_no_death(pool):
    pool.start("a", "b", step_s=0.02)
    async with gateway(pool, "a", "b") as engines:
        leaving = engines.find("a")
        messages = [make_message(f"r{i}", 5, 60) for i in range(8)]
        asked = [asyncio.create_task(pool.ask(message)) for message in messages]
        await pool.wait(lambda: pool.running.num_at("a"))
        pool.processes["a"].terminate()
        await pool.wait(lambda: pool.states()["a"] == "leaving")
        assert pool.routed() == {"b"}
        answers = await asyncio.gather(*asked)
        assert [tokens for _, tokens in answers] == [expected_tokens(m) for m in messages]
        ends = await leaving.read_journal(leaving.engine_id, 0, 100)
        await leaving.read_journal(leaving.engine_id, ends.last_seq, 100)
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


# ---- with clients that do what the test says ----


class FakeClient:
    """A client of an engine.   gate: answers wait for it.   poison: the prompt it dies of."""

    def __init__(self, member, on_service, gate):
        self.name, self.on_service, self.gate = member.name, on_service, gate
        self.welcome = Welcome(
            engine_id=f"id of {member.name}", epoch=1, base_revision="base-1", max_model_len=512,
            max_num_seqs=8, device="fake", dtype="float32",
        )  # fmt: skip
        self.stats = EngineStats()
        self.residency = {}
        self.is_ready, self.is_closed = True, False
        self.num_deaths = 0
        self.poison = ()
        self.told = []

    async def start(self):
        pass

    async def close(self):
        self.is_closed = True

    async def tell(self, message):
        self.told.append(message)

    async def generate(self, request, take):
        if not self.is_ready:
            raise EngineAwayError("the engine is starting")
        if request.prompt_token_ids == self.poison:
            self.is_ready, self.num_deaths = False, 1
            raise EngineDied(f"{self.name} 1")
        await self.gate.wait()
        take(RequestOutput(request.request_id, 0, stop_cause="eos", is_last=True))


class FakePool(Pool):
    """A gateway's EnginePool of engines that are fakes."""

    def __init__(self, *names):
        self.clients = {}
        self.gate = asyncio.Event()
        self.gate.set()
        super().__init__(None)
        self.members = [Member(name, f"ipc:///{name}") for name in names]

    def connect(self, member, on_lease_low, on_service):
        client = self.clients[member.name] = FakeClient(member, on_service, self.gate)
        return client


@asynccontextmanager
async def fakes(*names):
    pool = FakePool(*names)
    async with gateway(pool, *names):
        yield pool


async def test_a_long_prompt_goes_where_its_beginning_was_computed():
    prompts = [tuple([first] * 4 * CHUNK_TOKENS) for first in range(5, 15)]
    async with fakes("a", "b") as pool:

        async def ask(turn, number):
            prompt = (*prompts[number], turn)
            return (await pool.ask(make_message(f"r{turn}-{number}", prompt=prompt)))[0]

        # The first turns are sent at once, so that they are spread; later ones one by one.
        homes = await asyncio.gather(*(ask(1, number) for number in range(len(prompts))))
        assert set(homes) == {"a", "b"}
        for turn in (2, 3):
            assert [await ask(turn, number) for number in range(len(prompts))] == homes


async def test_requests_on_an_adapter_go_to_its_home_or_where_it_is_and_others_where_few_are():
    adapter = replace(make_adapter("a"), size_bytes=10**9)
    here = Residency(object_key=adapter.object_key, digest="", tier="device", size_bytes=1)
    async with fakes("a", "b") as pool:
        asked = [make_message(f"n{i}", 5, 3, adapter) for i in range(20)]
        assert len({pool.engines.route(message).name for message in asked}) == 1
        pool.running.add(RunningRequest("a crowd", "t", 40, 1, False, "a"))
        assert pool.routed() == {"b"}
        pool.running.remove(pool.running.find("a crowd"))
        for name, client in pool.clients.items():
            client.residency = {adapter.object_key: here}
            assert pool.engines.route(asked[0]).name == name
            client.residency = {}


async def test_who_was_not_there_did_not_die_of_a_request_and_another_is_named_for_it():
    message = make_message("r1", 5, 3)
    async with fakes("a", "b") as pool:
        for gone, other in (("a", "b"), ("b", "a")):
            assert pool.routed(besides=gone) == {other}
        away = pool.engines.find("a")
        pool.clients["a"].is_ready = False
        for _ in range(3):  # two deaths would make it a suspect
            with pytest.raises(EngineAwayError):
                await away.generate(message, lambda _: None)
        assert (await pool.ask(message))[0] == "b"
        with pytest.raises(EngineAwayError):
            pool.engines.route(message, "b")


async def test_who_joins_is_met_and_who_is_gone_is_forgotten():
    async with fakes("a") as pool:
        first = pool.members[0]
        assert pool.routed() == {"a"}
        pool.members.append(Member("b", "ipc:///b"))
        await pool.wait_ready("b")
        assert pool.routed() == {"a", "b"}
        long = make_message("long", prompt=[7] * 2 * CHUNK_TOKENS)
        await pool.ask(long)
        pool.clients["a"].num_deaths = 2
        pool.members.remove(first)
        await pool.wait(lambda: pool.states() == {"b": "ready"})
        assert pool.clients["a"].is_closed
        assert pool.engines.find("a") is None
        moved = pool.clients["b"]
        pool.members[0] = replace(pool.members[0], address="ipc:///c")
        await pool.wait(lambda: pool.clients["b"] is not moved)
        pool.members.clear()
        await pool.wait(lambda: pool.states() == {})
        assert not pool.engines._prefixes.cached_tokens(marks_of(long))
        assert pool.engines.num_deaths == 2
        assert pool.engines.max_model_len == 512, "what they could take is remembered"


async def test_what_stands_in_for_an_engine_that_is_gone_says_nothing_of_lengths():
    async with fakes("a") as pool:
        client = pool.clients["a"]
        client.welcome = replace(client.welcome, max_model_len=300)
        joins = Member("b", "ipc:///b")
        pool.members.append(joins)
        await pool.wait_ready("b")
        client.welcome = replace(client.welcome, max_model_len=0)
        pool.clients["b"].welcome = None
        assert pool.engines.max_model_len == 300


async def test_an_engine_of_another_model_gets_no_requests():
    async with fakes("a", "b", "c") as pool:
        other = pool.clients["c"]
        other.welcome = replace(other.welcome, base_revision="base-2", max_model_len=256)
        assert pool.states()["c"] == "of another model"
        assert pool.routed() == {"a", "b"}
        assert len(pool.engines.welcomes) == 2
        assert pool.engines.max_model_len == 512, "the other model's limit does not count"


async def test_each_pin_is_kept_at_one_engine_the_same_for_every_gateway():
    adapters = [make_adapter(f"ad{n}") for n in range(8)]
    async with fakes("a", "b") as pool, fakes("b", "a") as another:
        await pool.engines.pin(adapters)
        await another.engines.pin(list(reversed(adapters)))
        for name in ("a", "b"):
            (told,), (again,) = pool.clients[name].told, another.clients[name].told
            assert 0 < len(told.adapters) < 8
            assert set(told.adapters) == set(again.adapters)
        kept = [adapter for it in pool.clients.values() for adapter in it.told[0].adapters]
        assert sorted(kept, key=adapters.index) == adapters


async def test_every_engine_is_told_to_forget_drafts():
    async with fakes("a", "b") as pool:
        await pool.engines.forget_drafts("acme", "digest")
        message = ForgetDrafts(tenant_id="acme", adapter_digest="digest")
        assert [client.told for client in pool.clients.values()] == [[message], [message]]


async def test_service_of_one_engine_is_told_to_the_other_and_not_to_itself():
    async with fakes("a", "b") as pool:
        service = TenantService(engine_id="id of a", epoch=1, totals=(("t1", 2.0),))
        pool.clients["a"].on_service(service)
        await pool.wait(lambda: pool.clients["b"].told == [service])
        assert pool.clients["a"].told == []


def suspect_it(engines, message):
    for death in "xy":
        watch = engines.suspects.watch(fingerprint(message), "t", "gone")
        with suppress(EngineDied), watch:
            raise EngineDied(death)


async def test_a_suspect_waits_for_an_engine_that_serves_nobody_else_and_others_go_elsewhere():
    suspect = make_message("s", 5, 3)
    async with fakes("a", "b") as pool:
        suspects = pool.engines.suspects
        suspect_it(pool.engines, suspect)
        pool.gate.clear()
        others = [asyncio.create_task(pool.ask(make_message(f"r{i}", 5, 40))) for i in range(4)]
        await pool.wait(lambda: pool.running.num_at("a") and pool.running.num_at("b"))
        asked = asyncio.create_task(pool.ask(suspect))
        await pool.wait(lambda: suspects.trial)
        trial = suspects.trial
        (other,) = {"a", "b"} - {trial}
        pool.running.add(RunningRequest("a crowd", "t", 9, 1, False, other))
        assert pool.routed() == {other}
        assert not suspects.is_alone
        with pytest.raises(Suspected) as busy:
            await pool.ask(replace(suspect, request_id="again"))
        assert busy.value.retry_after_s
        elsewhere = pool.clients[trial]
        elsewhere.stats = EngineStats(running=1)  # of another gateway
        pool.gate.set()
        await asyncio.gather(*others)
        pool.gate.clear()
        elsewhere.stats = EngineStats()
        await pool.wait(lambda: suspects.is_alone)
        pool.gate.set()
        assert (await asked)[0] == trial
        assert suspects.all() == []


async def test_a_suspect_for_which_no_engine_is_free_in_time_is_sent_again_later():
    suspect = make_message("s", 5, 3, first_token_timeout_s=0.2)
    async with fakes("a") as pool:
        suspect_it(pool.engines, suspect)
        pool.clients["a"].stats = EngineStats(running=1)
        with pytest.raises(Suspected):
            await pool.ask(suspect)
        assert pool.engines.suspects.trial is None
