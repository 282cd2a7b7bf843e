"""What is refused before work is done for it: bodies by size, shape and time; who may send one."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.requests import Request
from starlette.types import Message, Scope

from server import bodies
from server.bodies import JsonBody, read_body
from server.database import DEFAULT_FILE
from server.errors import ApiError
from server.json_text import MAX_DEPTH, MAX_VALUES, check_json
from tests.server.in_process import InProcess

DEEP = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH


@pytest.fixture(scope="module")
def product(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("edges")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    product = InProcess.build(folder, f"sqlite:///{folder / DEFAULT_FILE}")
    yield product
    product.close()


# ---- JSON before it is parsed ----


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        DEEP,
        b'{"a": "' + b"[" * 99 + b'"}',
        b'{"a": "\\"' + b"[" * 99 + b'"}',
        b'{"a": "\\\\", "b": "' + b"{" * 99 + b'"}',
        b'["\\\\\\"' + b"[" * 99 + b'"]',
        b"[" + b"1," * (MAX_VALUES - 3) + b"1]",
        json.dumps(["[,{"] * 9999).encode(),
        b"[]" * 99,
    ],
)
def test_brackets_and_commas_in_strings_are_neither_depth_nor_values(body: bytes) -> None:
    assert check_json(body) == body.decode()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[" + DEEP + b"]", "json_too_deep"),
        (b'{"a":' * (MAX_DEPTH + 1), "json_too_deep"),
        (b'["\\\\",' + DEEP + b"]", "json_too_deep"),
        (b"[" * (1 << 20), "json_too_large"),
        (b"[" + b"1," * MAX_VALUES + b"1]", "json_too_large"),
        (b"[" + b"[]," * MAX_VALUES + b"1]", "json_too_large"),
        (b'"' * (1 << 20), "json_too_large"),
        (json.dumps([[[]] * 40] * 2).encode("utf-16"), None),
        (b'{"a": "\xff"}', None),
    ],
)
def test_what_is_too_deep_or_too_much_is_refused_unparsed(body: bytes, code: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        check_json(body)
    assert (refused.value.status, refused.value.code) == (400, code)


# ---- bodies ----


def request_of(chunks: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": await anext(chunks, b""), "more_body": True}

    listed = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "headers": listed}, receive)


async def endless(size_bytes: int) -> AsyncIterator[bytes]:
    while True:
        yield b"x" * size_bytes


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def test_a_body_is_refused_at_the_first_byte_over_its_limit() -> None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_body(request_of(endless(100)), 1000))
    assert refused.value.status == 413


@pytest.mark.parametrize("length", ["1001", "9" * 5000])
def test_a_body_that_says_it_is_too_long_is_not_read(length: str) -> None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_body(request_of(never(), {"content-length": length}), 1000))
    assert refused.value.status == 413


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.01)
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_body(request_of(never()), 1000))
    assert (refused.value.status, refused.value.code) == (408, "body_timeout")


# ---- who may send one ----


def parts_of(dependant: Dependant) -> list[Dependant]:
    return [dependant, *(part for each in dependant.dependencies for part in parts_of(each))]


def test_no_route_lets_the_framework_read_a_body(product: InProcess) -> None:
    """It would do so before it asks who calls."""
    routes = [r for r in iter_route_contexts(product.app.routes) if isinstance(r.route, APIRoute)]
    assert len(routes) > 40
    for route in routes:
        assert route.body_field is None, f"{route.path}: declare it by json_body(...)"


def call_unread(product: InProcess, method: str, path: str, key: str | None) -> tuple[int, int]:
    """(status, how often the body was asked for) of a request whose body never comes."""
    num_received, statuses = 0, []

    async def receive() -> Message:
        nonlocal num_received
        num_received += 1
        return {"type": "http.request", "body": b"[" * 99, "more_body": True}

    async def send(message: Message) -> None:
        statuses.append(message.get("status"))

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope: Scope = {
        "type": "http", "method": method, "path": path, "headers": headers, "query_string": b"",
    }  # fmt: skip
    asyncio.run(product.app(scope, receive, send))
    return statuses[0], num_received


def routes_with_bodies(product: InProcess) -> list[tuple[str, str]]:
    def reads(call: Any) -> bool:
        return isinstance(call, JsonBody) or call is bodies._inference_body

    return [
        (method, route.path.replace("{version}", "1").replace("{format}", "csv"))
        for route in iter_route_contexts(product.app.routes)
        if isinstance(route.route, APIRoute)
        and any(reads(part.call) for part in parts_of(route.dependant))
        for method in route.methods or ()
    ]


def test_a_body_is_not_read_for_a_caller_who_is_refused(product: InProcess) -> None:
    scopeless = product.user("scopeless", scopes=frozenset())
    routes = routes_with_bodies(product)
    assert len(routes) > 15
    for method, path in routes:
        for key in (None, "sk-chorale-nobodys"):
            assert call_unread(product, method, path, key) == (401, 0), f"{method} {path}"
        if path.startswith("/v1/"):
            answer = call_unread(product, method, path, scopeless.api_key)
            assert answer == (403, 0), f"{method} {path}: name the key before the body"


def test_a_malformed_body_without_a_key_is_told_of_the_key(product: InProcess) -> None:
    user = product.user("malformed")
    for key, status in (("nobodys", 401), (user.api_key, 400)):
        user.api_key = key
        answer = user.call("POST", "/v1/adapters/x/uploads", content=b'{"a": ')
        assert answer.status_code == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"name": "\\ud800"}',
        b'{"name": "a\\u0000b"}',
        b'{"\\ud800": 1}',
        b'{"name": "x", "weight": 1e999}',
        b'{"name": "x", "max_adapters": 1' + b"0" * 5000 + b"}",
        b'{"name": "x", "max_adapters": 9223372036854775808}',
        b'{"' + b"x" * 100_000 + b'": 1}',
    ],
)
def test_hostile_json_is_a_400_and_not_echoed(product: InProcess, body: bytes) -> None:
    caller = product.user(f"hostile-{abs(hash(body))}")
    for path in ("/admin/v1/tenants", "/v1/completions", "/v1/chat/completions"):
        user = product.operator if "admin" in path else caller
        answer = user.call("POST", path, content=body)
        assert answer.status_code == 400, f"{path} {answer.text}"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 1000
