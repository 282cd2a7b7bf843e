"""Limits of connections over real sockets: what a head may be, and whose connection is closed."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from registry.errors import Fault
from server.api import errors
from server.api.connections import Connections
from server.api.http_protocol import Deadline, HttpLimits, protocol
from tests.server.jumping_loop import run_jumping

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"
Address = tuple[str, int]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body and answer with its length. A path names the tenant whose key was shown.

    `/pieces` is answered in pieces, `/nothing` with a status that has no body. `/wind-down` winds
    all connections down.
    """
    if scope["path"] == "/wind-down":
        for each in scope["state"]["connection"].connections:
            each.wind_down()
        scope["path"] = "/"
    if scope["path"] in ("/pieces", "/nothing"):
        status = 200 if scope["path"] == "/pieces" else 204
        await send({"type": "http.response.start", "status": status, "headers": []})
        if status == 200:
            assert scope["state"]["connection"].write_piece(b"written,")
            await send({"type": "http.response.body", "body": b"sent,", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    if tenant_id := scope["path"][1:]:
        scope["state"]["connection"].show_key(tenant_id)
    size_bytes, more = 0, True
    while more:
        message = await receive()
        size_bytes += len(message["body"])
        more = message["more_body"]
    body = str(size_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(
    max_connections: int = 99, max_per_address: int = 99, **limits: float
) -> Iterator[Address]:
    """Run a server of the application above in a thread."""
    connections = Connections(max_connections, max_per_address)
    http = protocol(HttpLimits(**limits), connections)
    config = Config(app, http=http, timeout_keep_alive=60)
    config.load()
    addresses: list[Address] = []
    is_up, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        state = ServerState()
        server = await loop.create_server(
            lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),
            "127.0.0.1",
        )
        addresses.append(server.sockets[0].getsockname())
        is_up.set()
        await stop.wait()
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    is_up.wait()
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def received(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def refusal(address: Address, *sent: bytes) -> tuple[int, str | None]:
    """Send bytes; return (status, code) of an answer after which the server closes."""
    with socket.create_connection(address, timeout=10) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for data in sent:
                connection.sendall(data)
        head, _, body = received(connection).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


@pytest.mark.parametrize(
    "sent",
    [
        [HEAD, *[b"x: " + b"y" * 1000 + b"\r\n"] * 70],
        [HEAD + b"x: " + b"y" * 70_000],
        [b"GET /" + b"y" * 70_000],
        [HEAD + b"x: " + b"y" * 70_000 + b"\r\n\r\n"],
        [HEAD + b"x: y\r\n" * 100 + b"\r\n"],
    ],
    ids=["lines without end", "a line without end", "an address", "in one piece", "too many"],
)
def test_a_head_that_is_too_large_is_a_431(sent: list[bytes]) -> None:
    with serving() as address:
        assert refusal(address, *sent) == (431, "head_too_large")


def test_nothing_follows_the_head_of_an_answer_to_head() -> None:
    asked = HEAD.replace(b"GET", b"HEAD") + b"\r\n" + HEAD + b"connection: close\r\n\r\n"
    with serving() as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(asked)
        _, _, behind = received(connection).partition(b"\r\n\r\n")
    assert behind.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (b"GET /pieces HTTP/1.0", b"written,sent,"),
        (b"GET /nothing HTTP/1.0", b""),
        (b"GET / HTTP/1.0", b"0"),
        (b"GET /pieces HTTP/1.1\r\nconnection: close", b"8\r\nwritten,\r\n5\r\nsent,\r\n0\r\n\r\n"),
    ],
)
def test_only_http_1_1_gets_chunks_and_the_connection_ends_every_body(
    asked: bytes, answered: bytes
) -> None:
    with serving() as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(asked + b"\r\n\r\n")
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert (body, b"transfer-encoding: chunked" in head) == (answered, b"1.1" in asked)
    assert b"connection: close" in head


def test_an_answer_to_http_1_0_that_waited_its_turn_has_no_chunks() -> None:
    asked = [b"GET /pieces HTTP/1.1\r\n\r\n", b"GET /pieces HTTP/1.0\r\n\r\n"]
    with serving() as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"".join(asked))
        _, _, second = received(connection).partition(b"0\r\n\r\n")
    assert second.endswith(b"connection: close\r\n\r\nwritten,sent,")


@pytest.mark.parametrize("sent", [[], [b"GET"], [HEAD], [b"\r\n"]])
def test_a_head_that_does_not_come_is_a_408(sent: list[bytes]) -> None:
    with serving(head_timeout_s=0.02) as address:
        assert refusal(address, *sent) == (408, "head_timeout")


def test_bytes_one_by_one_do_not_extend_a_heads_time() -> None:
    with serving(head_timeout_s=0.05) as address, socket.create_connection(address) as connection:
        connection.sendall(HEAD)
        connection.settimeout(0.005)
        answer = b""
        while not answer:
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                connection.sendall(b"x")
        assert b" 408 " in answer


def test_a_deadline_that_was_lifted_or_set_anew_refuses_nobody() -> None:
    error = errors.head_timeout()

    async def run() -> list[Fault]:
        refused: list[Fault] = []
        deadline = Deadline(asyncio.get_running_loop())
        for in_s in (1, 3):
            deadline.set(in_s, refused.append, error)
        await asyncio.sleep(2)
        deadline.lift()
        await asyncio.sleep(2)
        assert not refused
        deadline.set(1, refused.append, error)
        await asyncio.sleep(2)
        return refused

    assert run_jumping(lambda _: run()) == [error]


def test_large_bodies_and_requests_one_after_the_other_are_served() -> None:
    limits = {"head_timeout_s": 30, "max_head_bytes": 200}
    with serving(**limits) as address, socket.create_connection(address) as connection:
        file = connection.makefile("rb")
        for size_bytes in (0, 100_000, 7, 300_000):
            connection.sendall(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % size_bytes)
            connection.sendall(b"x" * size_bytes)
            assert b" 200 " in file.readline()
            while file.readline() != b"\r\n":
                pass
            assert file.read(len(str(size_bytes))) == b"%d" % size_bytes
        file.close()


def test_a_head_after_an_answer_has_its_own_time() -> None:
    with serving(head_timeout_s=0.02) as address, socket.create_connection(address) as connection:
        connection.sendall(HEAD + b"\r\n" + HEAD)
        answered = received(connection)
        assert b" 200 " in answered
        assert b" 408 " in answered


def test_connections_over_the_limit_are_a_503_until_one_is_closed() -> None:
    with serving(max_connections=1) as address:
        with socket.create_connection(address) as connection:
            ask(connection, tenant=b"a")
            assert refusal(address) == (503, "too_many_connections")
            connection.sendall(HEAD + b"connection: close\r\n\r\n")
            assert b" 200 " in received(connection)
        with socket.create_connection(address) as connection:
            ask(connection)


def test_an_address_has_a_limit_of_its_own() -> None:
    with serving(max_per_address=1) as address, socket.create_connection(address) as connection:
        ask(connection)
        assert refusal(address) == (503, "too_many_connections")


def ask(connection: socket.socket, tenant: bytes = b"") -> bytes:
    """Send a request; return its answer, whose body is the length of none."""
    connection.sendall(HEAD.replace(b"/ ", b"/" + tenant + b" ") + b"\r\n")
    answer = b""
    while not answer.endswith(b"\r\n\r\n0"):
        piece = connection.recv(65536)
        assert piece, answer
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ")
    return answer


def test_silent_connections_give_way_to_clients_that_ask() -> None:
    with serving(max_connections=8, head_timeout_s=60) as address, ExitStack() as all_of_them:

        def connect() -> socket.socket:
            return all_of_them.enter_context(socket.create_connection(address, timeout=10))

        keyed, answered = connect(), connect()
        ask(keyed, tenant=b"a")
        ask(answered)
        silent = [connect() for _ in range(20)]
        assert received(answered) == b""  # closed, and nothing to say
        for connection in silent[:13]:
            assert b'"too_many_connections"' in received(connection)
        for client in (keyed, connect(), connect()):
            ask(client)
        for connection in silent[13:15]:
            assert b'"too_many_connections"' in received(connection)


def test_bodies_that_stall_before_a_key_keep_no_client_out_and_are_told_why() -> None:
    head = b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n"
    with serving(max_connections=8) as address, ExitStack() as all_of_them:

        def connect() -> socket.socket:
            return all_of_them.enter_context(socket.create_connection(address, timeout=10))

        stalled = [connect() for _ in range(8)]
        for connection in stalled:
            connection.sendall(head)
            assert b" 100 " in connection.recv(65536), "its body is being read"
        for tenant in range(8):
            ask(connect(), tenant=b"%d" % tenant)
        for connection in stalled:
            assert b'"too_many_connections"' in received(connection)


def test_a_small_body_that_stalls_never_reaches_the_application_and_is_a_408() -> None:
    with serving(body_timeout_s=0.02) as address:
        for length in (b"content-length: 9\r\n\r\nx", b"transfer-encoding: chunked\r\n\r\n1\r\nx"):
            assert refusal(address, b"POST / HTTP/1.1\r\n" + length) == (408, "body_timeout")


def test_a_connection_that_is_wound_down_is_told_so_by_one_more_answer_and_then_closed() -> None:
    with serving() as address, ExitStack() as all_of_them:
        fresh, idle, under_way = (
            all_of_them.enter_context(socket.create_connection(address, timeout=10))
            for _ in range(3)
        )
        assert b"connection: close" not in ask(idle)
        assert b"connection: close" in ask(under_way, b"wind-down")
        assert received(under_way) == b""
        for connection in (fresh, idle):
            assert b"connection: close" in ask(connection)
            assert received(connection) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        *(HEAD.replace(b"1.1", version) + b"\r\n" for version in (b"2.0", b"0.9", b"1.2", b"9.9")),
        b"GET /\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_that_is_spoken_here_is_a_400_in_our_shape(sent: bytes) -> None:
    with serving() as address:
        assert refusal(address, sent) == (400, None)
