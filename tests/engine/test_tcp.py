"""Engines on other machines: only holders of the pool's keys can communicate."""

import asyncio
import subprocess
import time
from pathlib import Path

import pytest
import zmq

from engine.errors import RequestRefused
from engine.wire.client import EngineClient
from engine.wire.encoding import encode
from engine.wire.endpoint import Endpoint
from engine.wire.messages import Hello
from engine.wire.tcp import TcpError, guard, listen
from tests.engine.fakes import expected_tokens, make_message
from tests.engine.test_process import (
    START_S,
    collect,
    connected,
    make_config,
    start_engine,
    wait_until,
    write_config,
)

SERVER, CLIENT, OTHER = ([key.decode() for key in zmq.curve_keypair()] for _ in range(3))


@pytest.fixture
def engine(tmp_path):
    """A function that starts a fake engine on TCP in place of the last; returns its address."""
    started = []

    def start(**changes):
        for process in started:
            process.kill()
            process.wait()
        given = {"listen": "tcp://127.0.0.1:0", "server_key": SERVER[1], "client_key": CLIENT[0]}
        config_path = write_config(tmp_path, **given | changes)
        address_path = tmp_path / "engine" / "address"
        address_path.unlink(missing_ok=True)
        started.append(start_engine(config_path, stderr=subprocess.PIPE))
        deadline = time.monotonic() + START_S
        while not address_path.exists() and started[-1].poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return address_path.read_text().strip() if address_path.exists() else None

    start.processes = started
    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def of_pool(address):
    return Endpoint(address, SERVER[0], CLIENT[1])


def ask(address, keys=None, timeout_ms=700):
    """The answer to a Hello from a socket with these keys (the engine's, its own), or None."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"stranger")
        if keys:
            guard(socket, Endpoint(address, *keys))
        socket.connect(address)
        socket.send(encode(0, Hello(gateway_id="stranger")), zmq.NOBLOCK)
        return socket.recv() if socket.poll(timeout_ms) else None


def test_requests_and_large_messages_cross_machines(engine):
    async def run():
        address = engine(max_num_batched_tokens=512)
        async with connected(endpoint=of_pool(address)) as client:
            long, short = make_message("long", 500, 10), make_message("short", 9, 40)
            assert await asyncio.gather(collect(client, long), collect(client, short)) == [
                expected_tokens(long), expected_tokens(short),
            ]  # fmt: skip
            huge = make_message("huge", 1_000_000, 1)
            with pytest.raises(RequestRefused, match="prompt_too_long"):
                await collect(client, huge)

    asyncio.run(run())


def test_an_engine_that_comes_back_at_its_address_is_found_again(engine):
    address = engine()

    async def run():
        async with connected(endpoint=of_pool(address)) as client:
            first = client.welcome.epoch
            assert engine(listen=address) == address
            while not client.is_ready or client.welcome.epoch == first:
                await asyncio.sleep(0.02)
            message = make_message("after", 9, 5)
            assert await collect(client, message) == expected_tokens(message)

    asyncio.run(asyncio.wait_for(run(), START_S))


def test_strangers_hear_nothing(engine):
    address = engine()
    assert ask(address) is None  # no keys at all
    assert ask(address, (SERVER[0], OTHER[1])) is None  # the engine does not know this client
    assert ask(address, (SERVER[0], SERVER[1])) is None  # the server's key is not a client's
    assert ask(address, (OTHER[0], CLIENT[1])) is None  # expects another server key
    assert ask(address, (SERVER[0], CLIENT[1]), timeout_ms=5000) is not None


def test_a_gateway_speaks_to_no_other_engine_than_the_pools(engine):
    address = engine(server_key=OTHER[1])

    async def run():
        client = EngineClient(of_pool(address))
        await client.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_until(lambda: client.is_ready), 1.0)
        await client.close()

    asyncio.run(run())


def test_a_refused_gateway_is_told_which_secret_to_compare(engine, caplog):
    address = engine()

    async def run():
        client = EngineClient(Endpoint(address, SERVER[0], OTHER[1]))
        await client.start()
        while not caplog.records:
            await asyncio.sleep(0.02)
        await client.close()

    asyncio.run(asyncio.wait_for(run(), START_S))
    assert "CHORALE_PEPPER" in caplog.text
    assert OTHER[1] not in caplog.text


@pytest.mark.parametrize("missing", ["server_key", "client_key"])
def test_without_keys_an_engine_binds_nothing(engine, missing):
    assert engine(**{missing: ""}) is None
    (process,) = engine.processes
    assert b"needs the pool's keys" in process.stderr.read()
    assert process.wait() != 0


@pytest.mark.parametrize("keys", [("", CLIENT[1]), (SERVER[0], "")])
def test_without_keys_a_gateway_does_not_connect(keys):
    with pytest.raises(TcpError, match="keys"):
        EngineClient(Endpoint("tcp://127.0.0.1:1", *keys))


def test_a_libzmq_without_curve_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(TcpError, match="pyzmq"):
        EngineClient(Endpoint("tcp://127.0.0.1:1", SERVER[0], CLIENT[1]))
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as socket,
        pytest.raises(TcpError, match="CURVE"),
    ):
        listen(socket, "tcp://127.0.0.1:0", SERVER[1], CLIENT[0], tmp_path / "address")
    EngineClient(Endpoint.of_socket(tmp_path / "engine.sock"))  # one machine needs no curve


def test_keys_are_not_shown():
    shown = repr(Endpoint("tcp://h:1", SERVER[0], CLIENT[1]))
    assert CLIENT[1] not in shown
    assert SERVER[1] not in repr(make_config(Path(), server_key=SERVER[1]))


def test_an_engine_that_is_asked_to_stop_ends_without_a_word_of_its_threads(engine):
    engine()
    (process,) = engine.processes
    process.terminate()
    assert process.stderr.read() == b""
    assert process.wait() == 0
