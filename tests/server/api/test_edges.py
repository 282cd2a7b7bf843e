"""Refusals before any work: bodies by size, shape and time, and callers who may not send one."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.requests import Request
from starlette.types import Message, Scope

from registry.errors import Fault, Invalid
from server.accounts.auth import INFERENCE, USAGE_READ
from server.api import bodies, errors
from server.api.bodies import JsonBody, read_body
from server.api.json_text import MAX_DEPTH, MAX_VALUES, check_json
from server.limits.inflow import Inflow
from tests.refusals import refused
from tests.server.in_process import ADMIN_KEY, InProcess, User, make_app, product_of_file
from tests.server.jumping_loop import run_jumping

DEEP = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH

product = product_of_file


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
    with pytest.raises(Invalid) as refused:
        check_json(body)
    assert refused.value.code == code


# ---- bodies ----


def read(chunks: AsyncIterator[bytes], headers: dict[str, str]) -> Fault:
    """Read a body of a tenant, within 1000 bytes, which is refused."""

    async def receive() -> Message:
        return {"type": "http.request", "body": await anext(chunks, b""), "more_body": True}

    async def reading(clock: Callable[[], float]) -> bytes:
        listed = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "headers": listed, "state": {"tenant_id": "a"}}
        return await read_body(
            Request(scope, receive), Inflow(900, 900, errors.bodies_busy, clock=clock), 1000
        )

    with pytest.raises(Fault) as refused:
        run_jumping(reading)
    return refused.value


async def pieces(size_bytes: int | None) -> AsyncIterator[bytes]:
    """Pieces of this size without an end; None for a body that does not come."""
    while True:
        if size_bytes is None:
            await asyncio.Event().wait()
        yield b"x" * (size_bytes or 0)


@pytest.mark.parametrize(
    ("piece_bytes", "headers", "code"),
    [
        (1001, {}, "request_too_large"),
        (1001, {"content-encoding": "identity"}, "request_too_large"),
        (100, {}, "bodies_busy"),
        (None, {}, "body_timeout"),
        (None, {"content-length": "1001"}, "request_too_large"),
        (None, {"content-length": "9" * 5000}, "request_too_large"),
        *(
            (None, {"content-encoding": encoding}, "compressed_body")
            for encoding in ("gzip", "deflate", "br", "ZSTD", "identity, gzip")
        ),
    ],
)
def test_a_body_is_refused_before_it_is_read_if_that_can_be_and_else_at_its_first_byte_too_many(
    piece_bytes: int | None, headers: dict[str, str], code: str
) -> None:
    assert read(pieces(piece_bytes), headers).code == code


@pytest.mark.parametrize("content", [gzip.compress(b"{}", mtime=0), b"\x28\xb5\x2f\xfd"])
def test_a_body_that_is_compressed_in_silence_is_told_so(content: bytes) -> None:
    with refused("compressed_body"):
        check_json(content)


# ---- callers who may send a body ----


def parts_of(dependant: Dependant) -> list[Dependant]:
    return [dependant, *(part for each in dependant.dependencies for part in parts_of(each))]


def test_no_route_lets_the_framework_read_a_body(product: InProcess) -> None:
    """The framework would read the body before the key is checked."""
    routes = [r for r in iter_route_contexts(product.app.routes) if isinstance(r.route, APIRoute)]
    assert len(routes) > 40
    for route in routes:
        assert route.body_field is None, f"{route.path}: declare it by json_body(...)"


def call_unread(
    product: InProcess, method: str, path: str, key: str | None, **state: Any
) -> tuple[int, int]:
    """(status, number of reads of the body) of a request whose body never ends."""
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
        "state": state,
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
    keys = [
        product.user(f"{scope[:5]}s", scopes={scope}).api_key for scope in (INFERENCE, USAGE_READ)
    ]
    routes = routes_with_bodies(product)
    assert len(routes) > 15
    for method, path in routes:
        for none in (None, "sk-chorale-nobodys"):
            assert call_unread(product, method, path, none) == (401, 0), f"{method} {path}"
        if path.startswith("/v1/"):
            answers = [call_unread(product, method, path, key) for key in keys]
            assert (403, 0) in answers, f"{method} {path}: name the key before the body"


def test_a_connection_is_told_whose_key_was_shown_and_may_refuse(product: InProcess) -> None:
    class Connection:
        """A connection that takes two tenants' keys."""

        def __init__(self) -> None:
            self.tenants: list[str] = []

        def show_key(self, tenant_id: str) -> None:
            if len(self.tenants) == 2:
                raise errors.too_many_connections()
            self.tenants.append(tenant_id)

    def get(path: str, key: str | None) -> int:
        return call_unread(product, "GET", path, key, connection=connection)[0]

    user, connection = product.user("connected"), Connection()
    assert get("/v1/models", None) == get("/v1/models", "sk-chorale-nobodys") == 401
    assert connection.tenants == []
    assert get("/v1/models", user.api_key) == get("/admin/v1/tenants", ADMIN_KEY) == 200
    assert connection.tenants == [user.tenant_id, "operator"]
    assert get("/v1/models", user.api_key) == get("/admin/v1/tenants", ADMIN_KEY) == 503


@pytest.mark.parametrize("second", ["good", "nobodys", ""])
async def test_two_authorization_headers_are_a_400_whatever_they_hold(
    product: InProcess, second: str
) -> None:
    both = [("authorization", f"Bearer {ADMIN_KEY}"), ("Authorization", second)]
    transport = httpx.ASGITransport(product.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.get("/admin/v1/tenants", headers=both)
    assert answer.status_code == 400
    assert "'Authorization'" in answer.json()["error"]["message"]


def test_a_key_at_the_wrong_door_is_told_the_right_one(product: InProcess) -> None:
    def said(path: str, key: str) -> str:
        answer = product.operator.call("GET", path, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 401
        return answer.json()["error"]["message"]

    tenants_key = product.user("knocks").api_key
    assert "Send it to /admin/v1" in said("/v1/models", ADMIN_KEY)
    assert "Send it to /v1" in said("/admin/v1/tenants", tenants_key)
    assert said("/admin/v1/tenants", "sk-chorale-nobodys") == said("/admin/v1/tenants", tenants_key)
    for path in ("/v1/models", "/admin/v1/tenants"):
        assert said(path, "nobodys") == "Incorrect API key provided."


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
    caller = product.user(f"hostile-{body[:20].hex()}-{len(body)}")
    for path in ("/admin/v1/tenants", "/v1/completions", "/v1/chat/completions"):
        user = product.operator if "admin" in path else caller
        answer = user.call("POST", path, content=body)
        assert answer.status_code == 400, f"{path} {answer.text}"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 1000


# ---- headers of every answer ----


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/admin/v1/tenants", "/nowhere", "/"])
@pytest.mark.parametrize("key", [ADMIN_KEY, "nobodys"])
def test_every_answer_has_the_headers_that_keep_browsers_and_caches_out(
    product: InProcess, path: str, key: str
) -> None:
    headers = User(product, "", "", key).call("GET", path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert headers["openai-version"] == "2020-10-01"
    assert headers["openai-processing-ms"].isdecimal()
    assert headers["x-request-id"].startswith("req_")
    assert "server" not in headers
    assert len(set(headers)) == len(headers.multi_items())


def test_a_stream_keeps_the_headers_of_a_stream(product: InProcess) -> None:
    answer = product.user("streams").complete("base", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache, no-transform"


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        (b"mine-1 of 2", True),
        (b"x" * 512, True),
        (b"x" * 513, False),
        (b"a\tb", False),
        (b"\xc3\xa9", False),
        (b"", False),
    ],
)
def test_a_request_id_of_the_clients_own_comes_back_if_it_is_printable(
    product: InProcess, sent: bytes, echoed: bool
) -> None:
    answer = product.operator.call("GET", "/health", headers={"x-client-request-id": sent})
    assert answer.headers.get("x-client-request-id") == (sent.decode() if echoed else None)


@pytest.mark.parametrize("path", ["/v1/adapters/a%00b", "/v1/usage?start=%00"])
def test_an_address_with_a_nul_is_refused(product: InProcess, path: str) -> None:
    assert product.operator.call("GET", path).status_code == 400


def test_an_unknown_address_or_method_is_an_error_in_openais_shape(product: InProcess) -> None:
    for method, path, status in (("GET", "/v2/chat", 404), ("PUT", "/health", 405)):
        answer = product.operator.call(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def post_without_a_key(product: InProcess, path: str) -> tuple[int, Any]:
    answer = product.operator.call("POST", path, headers={"authorization": ""})
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/v1/completions/", "/v1/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/uploads/up_1/complete/", "/v1/uploads/{upload_id}/complete"),
        ("/admin/v1/tenants/", "/admin/v1/tenants"),
    ],
)
def test_a_path_that_is_almost_right_is_told_the_right_one(
    product: InProcess, path: str, template: str
) -> None:
    status, error = post_without_a_key(product, path)
    assert (status, error["code"]) == (404, "unknown_url")
    assert f" Send this request to {template}. " in error["message"]


def test_a_list_of_models_with_a_slash_is_told_the_right_path(product: InProcess) -> None:
    error = product.user("acme").call("GET", "/v1/models/").json()["error"]
    assert error["code"] == "unknown_url"
    assert " Send this request to /v1/models. " in error["message"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses", "/v1/responses"),
        ("/v1/responses/resp_1/cancel", "/v1/responses"),
        ("/v1/embeddings/", "/v1/embeddings"),
        ("/v1/messages/count_tokens", "/v1/messages"),
        ("/v1/uploads", "/v1/uploads"),
        ("/v1/organization/projects", "/v1/organization"),
        ("/rerank", "/rerank"),
        ("/v2/rerank", "/v2/rerank"),
    ],
)
def test_an_endpoint_of_other_servers_is_a_400_that_says_it_is_not_served(
    product: InProcess, path: str, name: str
) -> None:
    status, error = post_without_a_key(product, path)
    assert (status, error["code"]) == (400, "endpoint_not_served")
    assert error["message"].startswith(f"Chorale does not serve {name}. ")


@pytest.mark.parametrize("path", ["/v1/response", "/v1/embeddings2", "/v1/a/files"])
def test_what_nobody_serves_is_a_404(product: InProcess, path: str) -> None:
    status, error = post_without_a_key(product, path)
    assert (status, error["code"]) == (404, "unknown_url")


def test_no_answer_redirects_to_what_the_host_header_says(product: InProcess) -> None:
    answer = product.operator.call("GET", "/admin/v1/tenants/", headers={"host": "evil.example"})
    assert answer.status_code == 404
    assert "evil" not in answer.text + str(answer.headers)


def test_a_fault_of_ours_is_a_500_that_says_nothing(product: InProcess) -> None:
    class Broken:
        @property
        def last(self) -> None:
            raise RuntimeError("insides")

    broken = InProcess(replace(product.gateway, auditor=Broken()), product.engines)
    answer = broken.operator.call("GET", "/admin/v1/audit")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "insides" not in answer.text
    assert answer.headers["x-request-id"]


# ---- pages of other origins ----


def preflight(product: InProcess, origin: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": "POST"}
    return product.operator.call("OPTIONS", "/v1/chat/completions", headers=headers)


def allowing(product: InProcess, *origins: str) -> tuple[InProcess, list[Mapping[str, Any]]]:
    """The product with other settings, and the lines of its log."""
    settings = product.gateway.settings.model_copy(update={"cors_origins": origins})
    gateway, lines = replace(product.gateway, settings=settings), []
    return InProcess(gateway, product.engines, make_app(gateway, lines.append)), lines


@pytest.mark.parametrize("origins", [(), ("https://app.example",)])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example.evil", "null", "x" * 999]
)
def test_a_page_that_may_not_call_is_told_and_logged(
    product: InProcess, origins: tuple[str, ...], origin: str
) -> None:
    shared, lines = allowing(product, *origins)
    answer = preflight(shared, origin)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "origin_not_allowed")
    assert error["message"].startswith(f"Pages of '{origin[:128]}' may not call")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert lines[-1]["refused_origin"] == f"'{origin[:128]}'"
    assert "access-control-allow-origin" not in shared.operator.call(
        "GET", "/health", headers={"origin": origin}
    ).headers  # fmt: skip


def test_a_page_that_may_call_reads_every_header_and_sends_no_cookies(product: InProcess) -> None:
    shared, lines = allowing(product, "https://app.example")
    asked = preflight(shared, "https://app.example")
    answer = shared.operator.call("GET", "/v1/x", headers={"origin": "https://app.example"})
    assert (asked.status_code, answer.status_code) == (200, 404)
    for got in (asked, answer):
        assert got.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-credentials" not in got.headers
    # The wildcard stands for all headers wherever there are no credentials.
    assert answer.headers["access-control-expose-headers"] == "*"
    assert "refused_origin" not in lines[0]
