"""The sizes of a stream's events do not say how many tokens each has; every client reads them."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from engine.errors import EngineDeadError
from engine.wire.messages import AddRequest, RequestOutput
from server.api.answers import DONE, event
from server.api.connections import Connections
from server.api.http_protocol import HttpLimits, protocol
from server.api.padding import ASKED_BYTES, Padding
from tests.server.asgi_caller import Caller
from tests.server.fake_engines import Script
from tests.server.in_process import User, make_app
from tests.server.scripted_product import CHAT, TEXT, Product

USAGE = {"include_usage": True, "continuous_usage_stats": True}
TOKENS = tuple(range(40, 52))
OTHERS = tuple(range(61, 73))
TOOL = {"type": "function", "function": {"name": "f"}}


def pad(scripted: Product, size: int) -> None:
    changed = scripted.gateway.settings.model_copy(update={"pad_events_to": size})
    scripted.gateway = replace(scripted.gateway, settings=changed)


def in_steps(ids: Sequence[int], counts: Sequence[int]) -> Script:
    """A script that says these tokens in steps of so many each."""
    assert sum(counts) == len(ids)

    def script(message: AddRequest) -> list[RequestOutput]:
        ends = list(itertools.accumulate(counts))
        return [
            RequestOutput(
                request_id=message.request_id,
                seq=seq,
                new_token_ids=tuple(ids[end - count : end]),
                finish_reason="length" if end == ends[-1] else None,
                stop_cause="max_tokens" if end == ends[-1] else None,
                num_prompt_tokens=message.num_prompt_tokens,
                num_completion_tokens=end,
                num_accepted_tokens=end - seq - 1,
                num_rejected_tokens=7 * seq,
                is_last=end == ends[-1],
            )
            for seq, (count, end) in enumerate(zip(counts, ends, strict=True))
        ]

    return script


def writes(scripted: Product, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """Pieces in which the application hands the body of its answer over."""
    caller = Caller(User(scripted, "", "", scripted.api_key), body, headers or {})
    asyncio.run(caller.call())
    return caller.received


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
def test_the_tokens_of_one_output_leave_as_one_event_in_one_piece(scripted, body) -> None:
    counts = (1, 8, 2, 1)
    scripted.engines.script = in_steps(TOKENS, counts)
    *parts, done = writes(scripted, body | {"stream": True, "return_token_ids": True})
    assert done == DONE
    found = [json.loads(part.removeprefix(b"data: ").removesuffix(b"\n\n")) for part in parts]
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in found] == list(counts)


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "text"])
@pytest.mark.parametrize("options", [{}, USAGE], ids=["plain", "usage"])
def test_streams_of_as_many_steps_have_equal_sizes_whatever_was_accepted(
    scripted, body, options
) -> None:
    pad(scripted, 768)
    sizes = []
    for ids, counts in ((TOKENS, (1, 8, 2, 1)), (TOKENS, (3, 3, 3, 3)), (OTHERS, (8, 2, 1, 1))):
        scripted.engines.script = in_steps(ids, counts)
        asked = body | {"stream": True, "stream_options": options}
        sizes.append([len(piece) for piece in writes(scripted, asked)])
    assert sizes[0] == sizes[1] == sizes[2] == [768] * (5 + bool(options))


def test_an_error_and_the_end_are_as_long_as_any_other_event(scripted) -> None:
    pad(scripted, 512)

    def breaks(message: AddRequest) -> list[RequestOutput | BaseException]:
        first, *_ = in_steps(TOKENS, (6, 6))(message)
        return [first, EngineDeadError("gone")]

    scripted.engines.script = breaks
    _, error = pieces = writes(scripted, CHAT | {"stream": True})
    assert [len(piece) for piece in pieces] == [512, 512]
    assert json.loads(error.partition(b"\n\n")[0][6:])["error"]["code"] == "engine_unavailable"
    scripted.engines.script = in_steps(TOKENS, (6, 6))
    assert len(writes(scripted, CHAT | {"stream": True})[-1]) == 512


def test_a_client_may_ask_for_padding_and_cannot_decline_the_operators(scripted) -> None:
    scripted.engines.script = in_steps(TOKENS, (6, 6))

    def sizes(**options: Any) -> set[int]:
        asked = CHAT | {"stream": True, "stream_options": options}
        return {len(piece) for piece in writes(scripted, asked)}

    assert sizes(include_obfuscation=True) == {ASKED_BYTES}
    assert ASKED_BYTES not in sizes() | sizes(include_obfuscation=False)
    pad(scripted, 1024)
    assert sizes() == sizes(include_obfuscation=False) == {1024}
    assert sizes(include_obfuscation=True) == {1024}


def test_an_answer_that_is_recorded_is_padded_too_and_replayed_as_it_was(scripted) -> None:
    pad(scripted, 600)
    scripted.engines.script = in_steps(TOKENS, (6, 6))
    body = CHAT | {"stream": True}
    pieces = writes(scripted, body, {"idempotency-key": "k"})
    assert [len(piece) for piece in pieces] == [600] * 3
    assert b"".join(writes(scripted, body, {"idempotency-key": "k"})) == b"".join(pieces)
    assert len(scripted.engines.asked) == 1


def test_a_padded_stream_has_an_event_for_every_step_also_where_it_shows_nothing(scripted) -> None:
    encode = scripted.gateway.bases.default.tokenizer.encode
    ids = encode('Yes. <tool_call>{"name": "f"', add_special_tokens=False)
    scripted.engines.script = in_steps(ids, [1] * len(ids))
    asked = CHAT | {"stream": True, "tools": [TOOL]}
    assert len(writes(scripted, asked)) < len(ids)
    pad(scripted, 512)
    assert [len(piece) for piece in writes(scripted, asked)] == [512] * (len(ids) + 1)


def read(scripted: Product, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> list[Any]:
    """Chunks of a stream as OpenAI's client reads them."""

    async def story() -> list[Any]:
        transport = httpx.ASGITransport(make_app(scripted.gateway))
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                api_key=scripted.api_key, base_url="http://gateway/v1", http_client=http
            ) as client,
        ):
            return [chunk async for chunk in await ask(client)]

    return asyncio.run(story())


@pytest.mark.parametrize("size", [0, 1, 512])
def test_openais_client_reads_padded_streams_as_if_they_were_not(scripted, size) -> None:
    pad(scripted, size)
    scripted.engines.script = in_steps(TOKENS, (1, 8, 2, 1))
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = read(scripted, lambda c: c.chat.completions.create(**CHAT, **options))
    said = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert said == scripted.words(TOKENS)
    details = last.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == len(TOKENS) - 4
    assert details.rejected_prediction_tokens == 7 * 3
    *texts, _ = read(scripted, lambda c: c.completions.create(**TEXT, **options))
    assert "".join(chunk.choices[0].text for chunk in texts) == said


@given(st.text(), st.integers(1, 2000))
def test_an_event_of_any_text_is_a_multiple_and_says_the_same(text: str, size: int) -> None:
    plain = event({"choices": [{"delta": {"content": text}}]})
    padded = Padding(size).part(plain)
    assert len(padded) % size == 0
    body = json.loads(padded[6:])
    assert set(body.pop("obfuscation")) <= {"-"}
    assert body == json.loads(plain[6:])
    assert len(padded.splitlines()) == 2
    assert len(Padding(size).last(DONE)) % size == 0
    assert Padding(size).last(DONE).startswith(DONE)


# ---- on the socket ----


class Wire(asyncio.Transport):
    """A connection that keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        return None

    def pause_reading(self) -> None:
        return None

    def resume_reading(self) -> None:
        return None


async def test_each_event_is_one_write_with_the_frame_of_its_chunk() -> None:
    events = [Padding(512).part(event({"text": "x" * count})) for count in (1, 8, 300)]

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    config = Config(stream, http=protocol(HttpLimits(), Connections(9, 9)))
    config.load()
    http: Any = config.http_protocol_class
    connection = http(config=config, server_state=ServerState(), app_state={})
    wire = Wire()
    connection.connection_made(wire)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    while not wire.written or not wire.written[-1].endswith(b"0\r\n\r\n"):
        await asyncio.sleep(0)
    written = wire.written
    frames = [b"200\r\n" + data + b"\r\n" for data in events]
    assert [data for data in written if b"data: " in data] == frames
