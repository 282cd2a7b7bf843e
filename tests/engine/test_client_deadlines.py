"""A gateway ends what waits for an engine that hangs, and takes all that a dead one had sent."""

import asyncio
import contextlib
import time

import pytest
import zmq
import zmq.asyncio

from engine.errors import EngineDeadError, EngineDied, FirstTokenLate
from engine.wire.client import EngineClient
from engine.wire.encoding import WIRE_VERSION, Numbering
from engine.wire.endpoint import Endpoint
from engine.wire.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    Heartbeat,
    ReadJournal,
    RequestOutput,
    StepOutputs,
    Welcome,
)
from engine.wire.records import JournalRecords
from tests.engine.fakes import make_message
from tests.engine.test_process import outputs_of, wait_until

WELCOME = Welcome(
    engine_id="eng-1", epoch=1, base_revision="base-1", max_model_len=512, max_num_seqs=4,
    device="fake", dtype="float32",
)  # fmt: skip
BEAT_S = 0.02
IN_TIME_S = -4.9
"""A limit for the first token that with the gateway's slack is a tenth of a second."""


class SilentEngine:
    """A socket that greets, and then says only what a test says."""

    def __init__(self, socket):
        self._socket = socket
        self._numbering = Numbering()
        self.heard = []

    async def hear(self, kind):
        """Wait for a message of this kind."""
        while not (found := [m for m in self.heard if isinstance(m, kind)]):
            _, frame = await self._socket.recv_multipart()
            self.heard.append(self._numbering.decode(frame))
        self.heard = [m for m in self.heard if m is not found[0]]
        return found[0]

    async def say(self, *messages):
        for message in messages:
            await self._socket.send_multipart([self.gateway, self._numbering.encode(message)])

    def die(self):
        """Close the socket. What was said has been sent."""
        self._socket.close(linger=-1)

    async def greet(self, silence_s):
        self.gateway, frame = await self._socket.recv_multipart()
        self._numbering.decode(frame)
        await self.say(WELCOME, EngineStats(silence_s=silence_s))


@contextlib.asynccontextmanager
async def silent_engine(path, silence_s):
    """An engine that may be silent for so long, and a client that is connected to it."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{path / 's'}")
        client = EngineClient(Endpoint.of_socket(path / "s"), heartbeat_s=BEAT_S)
        await client.start()
        try:
            engine = SilentEngine(socket)
            await engine.greet(silence_s)
            await wait_until(lambda: client.is_ready)
            yield engine, client
        finally:
            await client.close()


def first_output(request_id, **fields):
    return StepOutputs(outputs=(RequestOutput(request_id=request_id, seq=0, **fields),))


async def read(client, message):
    return [output async for output in outputs_of(client, message)]


def run(test):
    asyncio.run(asyncio.wait_for(test, 30))


def test_an_engine_of_another_version_is_named_with_what_to_do(tmp_path, caplog):
    async def main():
        async with silent_engine(tmp_path, 30) as (engine, _):
            newer = bytes([WIRE_VERSION + 1])
            await engine._socket.send_multipart([engine.gateway, newer])
            while not caplog.records:
                await asyncio.sleep(0.01)

    run(main())
    assert "run gateways and engines of one release" in caplog.text


def test_requests_of_an_engine_that_says_nothing_at_all_end_as_when_it_dies(tmp_path):
    async def test():
        async with silent_engine(tmp_path, silence_s=0.2) as (engine, client):
            reading = asyncio.create_task(read(client, make_message("r1")))
            await engine.hear(AddRequest)
            with pytest.raises(EngineDeadError, match="died"):
                await reading
            assert (client.is_ready, client.num_deaths) == (False, 1)

    run(test())


def test_a_request_sent_to_an_engine_that_had_long_been_silent_was_not_there_when_it_died(
    tmp_path,
):
    async def test():
        async with silent_engine(tmp_path, silence_s=600.0) as (engine, client):
            there = asyncio.create_task(read(client, make_message("r1")))
            await engine.hear(AddRequest)
            await engine.say(first_output("r1", new_token_ids=(7,)))
            for _ in range(8):
                await engine.hear(Heartbeat)
            too_late = asyncio.create_task(read(client, make_message("r2")))
            await engine.hear(AddRequest)
            engine.die()
            with pytest.raises(EngineDied) as died:
                await there
            assert died.value.start == "eng-1 1"
            with pytest.raises(EngineDeadError) as other:
                await too_late
            assert not isinstance(other.value, EngineDied)

    run(test())


def test_an_engine_that_announced_long_work_is_waited_for(tmp_path):
    async def test():
        async with silent_engine(tmp_path, silence_s=600.0) as (engine, client):
            for _ in range(30):
                await engine.hear(Heartbeat)
            assert client.is_ready
            await engine.say(EngineStats(silence_s=0.2))
            while client.is_ready:
                await asyncio.sleep(BEAT_S)

    run(test())


def test_a_request_whose_first_token_is_late_is_ended_by_the_gateway_if_the_engine_does_not(
    tmp_path,
):
    async def test():
        async with silent_engine(tmp_path, silence_s=600.0) as (engine, client):
            message = make_message("r1", first_token_timeout_s=IN_TIME_S)
            reading = asyncio.create_task(read(client, message))
            await engine.hear(AddRequest)
            scored = first_output("r1", prompt_logprobs=())
            await engine.say(scored)
            with pytest.raises(FirstTokenLate):
                await reading
            assert await engine.hear(AbortRequests) == AbortRequests(request_ids=("r1",))
            assert (client.is_ready, client.num_deaths) == (True, 0)

    run(test())


def test_an_answer_that_comes_late_is_not_taken_for_the_next_ones(tmp_path):
    async def test():
        async with silent_engine(tmp_path, silence_s=600.0) as (engine, client):
            given_up, reading = [
                asyncio.create_task(client.read_journal("eng-1", 7, 9)) for _ in range(2)
            ]
            reads = [await engine.hear(ReadJournal) for _ in range(2)]
            given_up.cancel()
            for number, read in enumerate(reads):
                await engine.say(
                    JournalRecords(
                        read_id=read.read_id, engine_id="eng-1", last_seq=number, complete=True
                    )
                )
            assert (await reading).last_seq == 1

    run(test())


def test_a_gateway_that_is_behind_takes_all_that_an_engine_had_sent_before_it_died(tmp_path):
    num_outputs = 100
    taken = []

    def take_slowly(output):
        time.sleep(0.002)  # it holds the event loop, which hears of the death meanwhile
        taken.append(output.seq)

    async def test():
        async with silent_engine(tmp_path, silence_s=600.0) as (engine, client):
            answering = asyncio.create_task(client.generate(make_message("r1"), take_slowly))
            await engine.hear(AddRequest)
            outputs = [RequestOutput(request_id="r1", seq=seq) for seq in range(num_outputs)]
            outputs[-1] = outputs[-1]._replace(finish_reason="length", is_last=True)
            await engine.say(*[StepOutputs(outputs=(output,)) for output in outputs])
            engine.die()
            await answering
            assert taken == list(range(num_outputs))

    run(test())
