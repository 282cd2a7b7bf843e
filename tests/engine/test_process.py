"""The engine as a process: it streams over a socket, dies cleanly and resumes from its journal."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict

import pytest
import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.journal.files import JournalGone
from engine.process import engine_identity, lock_directory
from engine.scheduling.fairness import DECODE_COST
from engine.steps.meter import TokenMeter
from engine.steps.times import MOST_S
from engine.wire.client import EngineClient
from engine.wire.encoding import decode, encode, write_vocabulary
from engine.wire.endpoint import Endpoint
from engine.wire.messages import (
    EngineStats,
    Heartbeat,
    Hello,
    Residency,
    TenantService,
    Welcome,
)
from engine.wire.pulled import pulled
from tests.engine.fakes import VOCABULARY, expected_tokens, make_adapter, make_message

START_S = 60.0


def make_config(directory, **changes):
    return EngineConfig(
        data_dir=str(directory / "engine"),
        model_dir="",
        base_revision="base-1",
        vocabulary_path=str(directory / "vocabulary"),
        eos_token_ids=(0,),
        adapter_cache_dir="",
        fetcher_socket="",
        device="cpu",
        dtype="float32",
        arena_bytes=0,
        threads=1,
        max_model_len=512,
        **changes,
    )


def write_config(directory, **changes):
    write_vocabulary(directory / "vocabulary", VOCABULARY)
    path = directory / "engine.json"
    path.write_text(json.dumps(asdict(make_config(directory, **changes))))
    return path


def start_engine(config_path, step_s=0.0, stderr=None):
    env = os.environ | {"FAKE_STEP_S": str(step_s)}
    command = [sys.executable, "-m", "tests.engine.fake_engine", str(config_path)]
    return subprocess.Popen(command, stderr=stderr, env=env)


async def wait_until(condition):
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(directory=None, endpoint=None, **options):
    """A client of the engine in a directory, or at an endpoint."""
    endpoint = endpoint or Endpoint.of_socket(directory / "engine" / "engine.sock")
    client = EngineClient(endpoint, **options)
    await client.start()
    try:
        await wait_until(lambda: client.is_ready)
        yield client
    finally:
        await client.close()


@contextmanager
def starting_engines(directory):
    """A function that starts an engine; all engines are killed at the end."""
    started = []

    def start(step_s=0.0, **changes):
        started.append(start_engine(write_config(directory, **changes), step_s))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def engine(tmp_path):
    with starting_engines(tmp_path) as start:
        yield start


def outputs_of(client, *request):
    """Outputs of a request to an EngineClient or an EnginePool; closing the generator aborts it.

    request: what its `generate` takes before `take`.
    """
    return pulled(lambda take: client.generate(*request, take))


async def collect(client, message):
    return [t async for output in outputs_of(client, message) for t in output.new_token_ids]


async def drain(stream):
    async for _ in stream:
        pass


def greet(directory):
    """The first three messages that an engine sends to a gateway."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, b"x")
        socket.setsockopt(zmq.RCVTIMEO, int(START_S * 1000))
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{directory / 'engine' / 'engine.sock'}")
        socket.send(encode(0, Hello(gateway_id="x")))
        return [decode(socket.recv())[1] for _ in range(3)]


def test_a_new_gateway_hears_figures_and_residency_before_anything_else(engine, tmp_path):
    engine()

    async def run():
        async with connected(tmp_path) as client:
            await collect(client, make_message(max_tokens=2, adapter=make_adapter()))
            return await asyncio.to_thread(greet, tmp_path)

    welcome, stats, residency = asyncio.run(run())
    assert (type(welcome), type(residency)) == (Welcome, Residency)
    assert (type(stats), stats.steps > 0, stats.is_leaving) == (EngineStats, True, False)


def test_a_gateway_hears_that_a_request_of_another_can_be_settled(engine, tmp_path):
    engine()

    async def run():
        heard = asyncio.Event()
        async with connected(tmp_path, on_end=heard.set) as settling, connected(tmp_path) as other:
            assert heard.is_set(), "a journal may have records before anybody connects"
            heard.clear()
            await collect(other, make_message(max_tokens=2))
            await asyncio.wait_for(heard.wait(), START_S)
            assert settling.stats.unsettled_records == 1

    asyncio.run(run())


def open_contexts():
    # type(), since isinstance would make some objects of the process warn.
    return {id(c) for c in gc.get_objects() if type(c) is zmq.Context and not c.closed}


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_client_leaves_no_context_open_even_if_its_closing_is_cancelled(tmp_path, is_cancelled):
    before = open_contexts()

    async def run():
        client = EngineClient(Endpoint.of_socket(tmp_path / "nobody.sock"))
        await client.start()
        await asyncio.sleep(0)
        assert open_contexts() > before
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        if is_cancelled:
            closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        return client

    client = asyncio.run(run())
    assert open_contexts() == before, client


def test_leaving_a_stream_early_aborts_the_request(engine, tmp_path):
    engine(step_s=0.01)

    async def run():
        async with connected(tmp_path) as client:
            stream = outputs_of(client, make_message(max_tokens=400))
            await anext(stream)
            await stream.aclose()
            for _ in range(100):
                journal = await client.read_journal(client.welcome.engine_id, 0, 10)
                if journal.records:
                    break
                await asyncio.sleep(0.02)
            (record,) = journal.records
            assert record.stop_cause == "aborted"
            assert 0 < record.num_completion_tokens < 400

    asyncio.run(run())


def test_a_killed_engine_ends_its_streams_and_its_successor_counts_what_it_sent(engine, tmp_path):
    process = engine(step_s=0.01)

    async def run():
        async with connected(tmp_path) as client:
            received = {}

            async def read(message):
                received[message.request_id] = []
                async for output in outputs_of(client, message):
                    received[message.request_id] += output.new_token_ids
                    if len(received[message.request_id]) == 5:
                        process.send_signal(signal.SIGKILL)

            streams = [read(make_message(f"r{i}", max_tokens=300)) for i in range(4)]
            ends = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 10)
            assert all(isinstance(end, EngineDeadError) for end in ends)
            assert not client.is_ready
            with pytest.raises(EngineDeadError):
                await collect(client, make_message("too-early"))

            process.wait()
            engine()
            await wait_until(lambda: client.is_ready)
            journal = await client.read_journal(client.welcome.engine_id, 0, 10)
            assert {r.stop_cause for r in journal.records} == {"engine_failure"}
            for record in journal.records:
                assert record.num_completion_tokens >= len(received[record.request_id])
            _, sampled, _, last = TokenMeter.read(tmp_path / "engine" / "meter")
            journaled = sum(r.num_completion_tokens for r in journal.records)
            # The last step is either whole in the journal or its tokens were not sent.
            assert journaled in (sampled, sampled - last)
            assert await collect(client, make_message("again")) == expected_tokens(
                make_message("again")
            )

    asyncio.run(run())


def test_a_gateway_is_told_what_tenants_were_given_here_for_the_other_engines(engine, tmp_path):
    engine()
    told = []

    async def run():
        async with connected(tmp_path, on_service=told.append) as client:
            await client.tell(TenantService(engine_id="far", epoch=1, totals=(("t1", 5.0),)))
            for turn in (1, 2):
                message = make_message(f"r{turn}", prompt_len=9, max_tokens=2)
                await collect(client, message)
                total = ("t1", turn * (9 + 2 * DECODE_COST))
                while not told or told[-1].totals != (total,):
                    await asyncio.sleep(0.005)
            return client.welcome

    welcome = asyncio.run(asyncio.wait_for(run(), START_S))
    senders = {(message.engine_id, message.epoch) for message in told}
    assert senders == {(welcome.engine_id, welcome.epoch)}


def test_an_identity_lasts_and_its_file_stays_where_it_is(tmp_path):
    engine_id, epoch = engine_identity(tmp_path)
    inode = (tmp_path / "identity").stat().st_ino
    for i in range(1, 12):
        assert engine_identity(tmp_path) == (engine_id, epoch + i)
    assert (tmp_path / "identity").stat().st_ino == inode, "a full disk has no room for a new file"


def test_an_engine_whose_journal_vanished_does_not_begin_another(tmp_path):
    engine_identity(tmp_path)
    engine_identity(tmp_path)
    (tmp_path / "journal").rmdir()
    with pytest.raises(JournalGone, match=f"remove {tmp_path}"):
        engine_identity(tmp_path)
    (tmp_path / "identity").unlink()  # the operator goes on without it
    engine_identity(tmp_path)
    with pytest.raises(JournalGone):
        lock_directory(tmp_path / "deleted")


def test_only_one_engine_runs_on_a_data_directory(engine, tmp_path):
    engine()

    async def run():
        async with connected(tmp_path):
            second = start_engine(tmp_path / "engine.json")
            assert second.wait(START_S) != 0

    asyncio.run(run())


def test_an_engine_ends_the_requests_of_a_silent_gateway_and_then_itself(engine, tmp_path):
    process = engine(step_s=0.01, gateway_timeout_s=2.0)

    async def run():
        hanging = connected(tmp_path, heartbeat_s=3600)
        async with connected(tmp_path) as other, hanging as silent:
            stream = outputs_of(silent, make_message(max_tokens=500))
            await anext(stream)
            while not (journal := await other.read_journal(other.welcome.engine_id, 0, 10)).records:
                await asyncio.sleep(0.05)
            assert journal.records[0].stop_cause == "gateway_lost"
            assert journal.records[0].num_completion_tokens > 0
            # The engine answers the gateway's next message by saying that it no longer knows it.
            await silent.tell(Heartbeat())
            with pytest.raises(EngineDeadError):
                await drain(stream)
            await wait_until(lambda: silent.is_ready)

    asyncio.run(run())
    assert process.wait(START_S) == 0


def test_a_step_that_takes_longer_than_a_gateway_may_be_silent_is_announced_and_ends_nothing(
    engine, tmp_path
):
    engine(step_s=1.2, gateway_timeout_s=0.6)

    async def run():
        async with connected(tmp_path, heartbeat_s=0.1) as client:
            message = make_message(max_tokens=2)
            reading = asyncio.create_task(collect(client, message))
            while client.stats is None or client.stats.silence_s < MOST_S:
                await asyncio.sleep(0.01)
            assert await reading == expected_tokens(message)

    asyncio.run(run())


@pytest.mark.parametrize("module", ["tests.engine.fake_engine", "engine.retired"])
def test_what_has_no_model_starts_without_torch(module):
    """Tests start dozens of fake engines, and importing torch would take 2 s each."""
    code = f"import sys, {module}; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (answer.stdout, answer.stderr) == ("False\n", "")
