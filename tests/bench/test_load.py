"""The open-loop client against a server whose answers the test chooses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bench.load import run_load
from bench.outcome import Outcome
from bench.workload import BenchRequest

DONE = "data: [DONE]\n\n"
KEYS = {"a": "key-of-a", "b": "key-of-b"}


def chunk(*token_ids: int) -> str:
    choice = {"index": 0, "text": "x", "token_ids": list(token_ids)}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


class SseServer:
    """A server with one endpoint. answer: the request's JSON -> (status, pieces of the body)."""

    def __init__(self, answer: Callable[[dict], tuple[int, list[str]]]) -> None:
        self.answer = answer
        self.received: list[tuple[str, dict]] = []
        self.hold: asyncio.Event | None = None  # answers wait for it

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            yield f"http://{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.received.append((headers["authorization"], body))
        if self.hold:
            await self.hold.wait()
        status, pieces = self.answer(body)
        writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece.encode())
            await writer.drain()
        writer.close()
        await writer.wait_closed()


def make_request(index: int = 0, **changes: object) -> BenchRequest:
    plain = {"model": "a", "prompt_token_ids": (1, 2, 3), "max_tokens": 2, "due_s": 0.0}
    return BenchRequest(index=index, **(plain | changes))


def run(server: SseServer, *requests: BenchRequest) -> list[Outcome]:
    async def go() -> list[Outcome]:
        async with server.listening() as url:
            return await run_load(url, KEYS, requests, timeout_s=5.0)

    return asyncio.run(go())


def test_a_streamed_answer_gives_its_tokens_and_a_time_for_every_chunk() -> None:
    (outcome,) = run(SseServer(lambda _: (200, [chunk(7), chunk(8), DONE])), make_request())
    assert outcome.error is None
    assert outcome.token_ids == (7, 8)
    assert len(outcome.chunk_s) == 2
    assert 0.0 <= outcome.sent_s <= outcome.chunk_s[0] <= outcome.chunk_s[1] <= outcome.end_s


def test_an_answer_in_llama_cpps_own_form_is_read_too() -> None:
    events = [{"tokens": [7], "stop": False}, {"tokens": [8], "stop": True}]
    pieces = [f"data: {json.dumps(event)}\n\n" for event in events]
    (outcome,) = run(SseServer(lambda _: (200, pieces)), make_request())
    assert (outcome.error, outcome.token_ids) == (None, (7, 8))


def test_every_model_is_asked_with_its_own_key_for_exactly_so_many_tokens() -> None:
    server = SseServer(lambda _: (200, [chunk(7, 8), DONE]))
    run(server, make_request(0), make_request(1, model="b"))
    by_model = {body["model"]: (key, body) for key, body in server.received}
    assert by_model["b"][0] == "bearer key-of-b"
    body = by_model["a"][1]
    assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3], 2)
    assert body["ignore_eos"] is True
    assert body["stream"] is True
    assert body["temperature"] == 0


def test_requests_leave_when_due_however_many_are_still_under_way() -> None:
    """No answer comes before the last of 133 requests has arrived: a closed loop would hang."""
    server = SseServer(lambda _: (200, [chunk(7, 8), DONE]))

    async def go() -> list[Outcome]:
        server.hold = asyncio.Event()
        async with server.listening() as url:
            requests = [make_request(i, due_s=i / 10_000) for i in range(133)]
            load = asyncio.create_task(run_load(url, KEYS, requests, timeout_s=5.0))
            while len(server.received) < 133 and not load.done():
                await asyncio.sleep(0)
            server.hold.set()
            return await load

    outcomes = asyncio.run(go())
    assert [outcome.index for outcome in outcomes] == list(range(133))
    assert {outcome.error for outcome in outcomes} == {None}


REFUSAL = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "overloaded"}})
FAILURES = {
    "503 overloaded": (503, [REFUSAL]),
    "502": (502, ["<html>"]),
    "engine_unavailable": (
        200, [chunk(7), 'data: {"error": {"message": "no", "code": "engine_unavailable"}}\n\n']
    ),
    "stream_ended_early": (200, [chunk(7), chunk(8)]),
    "wrong_length": (200, [chunk(7), DONE]),
}  # fmt: skip
"""Answers that are no success, by the error that they are counted as."""


@pytest.mark.parametrize("error", FAILURES)
def test_what_is_not_a_whole_answer_is_an_error_by_its_code(error: str) -> None:
    (outcome,) = run(SseServer(lambda _: FAILURES[error]), make_request())
    assert outcome.error == error
