"""Logs hold ids and figures but no content of requests, and slow log readers delay no request."""

import asyncio
import io
import itertools
import json
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from engine.errors import RequestRefused
from engine.wire.messages import AddRequest, RequestOutput, Timings
from lora.log_lines import trace_of
from server.logs import LogHandler, LogWriter
from tests.server.fake_engines import FakeEngines, answer_at_once
from tests.server.in_process import InProcess, User, make_app, with_engines
from tests.server.scripted_product import answer_all, end_at_once

MARK = "zebra"
PROMPT, HEADER = f"{MARK} prompt", f"{MARK} header"


@dataclass
class Logged:
    """A product and the lines that its requests left."""

    product: InProcess
    lines: list[dict[str, Any]] = field(default_factory=list)

    def last(self) -> dict[str, Any]:
        return {name: value for name, value in self.lines[-1].items() if value is not None}


@pytest.fixture
def logged(product: InProcess) -> Logged:
    logged = Logged(product)
    product._app = make_app(product.gateway, logged.lines.append)
    return logged


# ---- lines of requests ----


def test_a_requests_line_says_whose_it_was_and_how_it_went(logged: Logged) -> None:
    user = logged.product.user("acme")
    body = {"model": "base", "prompt": "Hello there", "max_tokens": 9}
    answer = user.call("POST", "/v1/completions", body, {"x-client-request-id": "mine"})
    line = logged.last()
    assert line.pop("at") > 1.7e9
    assert line.pop("duration_ms") >= line.pop("ttft_ms") > 0
    assert line == {
        "level": "info",
        "request_id": answer.headers["x-request-id"],
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "tenant_id": user.tenant_id,
        "key_id": user.api_key.split("-")[2],
        "client_request_id": "mine",
        "prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "completion_tokens": 3,
        "engine": "engine",
        "model": "base",
    }


def test_a_stream_is_one_line_with_what_it_used_at_its_end(logged: Logged) -> None:
    logged.product.user("acme").complete("base", stream=True)
    assert [line["completion_tokens"] for line in logged.lines] == [3]


def test_a_line_says_what_a_request_waited_for_even_if_it_failed(logged: Logged) -> None:
    timings = Timings(load_s=0.25, load_tier="store", queue_s=0.5)
    user = logged.product.user("acme")
    for ending in ("length", "error"):
        script = end_at_once(finish_reason=ending, stop_cause="adapter_missing", timings=timings)
        logged.product.use(FakeEngines(script))
        user.complete("base")
        assert (logged.last()["load_ms"], logged.last()["queue_ms"]) == (250.0, 500.0)
    logged.product.use(FakeEngines(answer_all))
    user.complete("base")
    assert logged.last()["itl_ms_p50"] >= 0


def test_lines_of_probes_are_for_debugging_unless_readiness_has_changed(logged: Logged) -> None:
    for is_ready in (False, False, True, True, False, False, True):
        logged.product.engines.is_ready = is_ready
        for path in ("/ready", "/health"):
            logged.product.operator.call("GET", path)
    levels = [line["level"] for line in logged.lines]
    assert levels[::2] == ["info", "debug", "info", "debug", "warning", "debug", "info"]
    assert set(levels[1::2]) == {"debug"}
    assert logged.lines[0]["missing"] == "engine"


def test_a_route_is_named_as_it_is_declared_and_an_unknown_one_not_at_all(logged: Logged) -> None:
    for path, route in ((f"/v1/adapters/{MARK}", "/v1/adapters/{name}"), (f"/{MARK}", None)):
        logged.product.operator.call("GET", path)
        assert logged.last().get("route") == route


def ask_broken(logged: Logged, error: BaseException, **case: bool) -> httpx.Response | None:
    """Ask engines that fail, at once or after a token; None where the connection is closed."""

    def script(message: AddRequest) -> list[RequestOutput | BaseException]:
        (output,) = answer_at_once(message)
        first = output._replace(finish_reason=None, stop_cause=None, is_last=False)
        return [first, error] if case["has_begun"] else [error]

    logged.product.use(FakeEngines(script))
    user = logged.product.user(f"tenant-{len(logged.lines)}")
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 9, "stream": case["is_stream"]}
    headers = {"idempotency-key": "k"} if case["has_idempotency_key"] else {}
    try:
        return user.call("POST", "/v1/completions", body, headers)
    except type(error):
        return None


@pytest.mark.parametrize(
    "error",
    [
        KeyError(PROMPT),
        RequestRefused("of no kind that is known"),
        ExceptionGroup(PROMPT, [KeyError(PROMPT)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_fault_of_ours_leaves_a_trace_and_is_a_500_unless_the_answer_has_begun(
    logged: Logged, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    names = ("has_begun", "is_stream", "has_idempotency_key")
    for flags in itertools.product([False, True], repeat=len(names)):
        case = dict(zip(names, flags, strict=True))
        caplog.clear()
        answer = ask_broken(logged, error, **case)
        if not (case["has_begun"] and case["is_stream"]):
            assert answer is not None, case
            assert answer.status_code == 500, case
            assert answer.json()["error"]["code"] == "internal_error"
        line = logged.lines[-1]
        assert line["level"] == "error", case
        raised = [record.exc_info[1] for record in caplog.records if record.exc_info]
        traces = [trace_of(each) for each in raised if each is not None] + [line["trace"]]
        assert any(type(error).__name__ in trace for trace in traces), case
        assert any(place.endswith("generate") for trace in traces for place in trace), case
        assert "KeyError" in str(traces) or isinstance(error, RequestRefused)
        assert MARK not in json.dumps(line)


def test_work_that_was_cancelled_by_another_is_a_fault_of_ours(logged: Logged) -> None:
    """The server would answer with text of its own."""
    case = {"has_begun": False, "is_stream": False, "has_idempotency_key": False}
    answer = ask_broken(logged, asyncio.CancelledError(), **case)
    assert answer is not None
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "CancelledError" in logged.last()["trace"]


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "once"}])
@pytest.mark.parametrize("stream", [False, True])
def test_every_500_says_where_and_a_request_that_the_engine_ended_says_why(
    logged: Logged, stream: bool, headers: dict[str, str]
) -> None:
    failed = FakeEngines(end_at_once(finish_reason="error", stop_cause="engine_failure"))
    user = logged.product.user("acme")
    gateway = with_engines(logged.product.gateway, failed)
    broken = User(InProcess(gateway, failed, make_app(gateway, logged.lines.append)), "", "",
                  user.api_key)  # fmt: skip
    body = {"model": "base", "prompt": "Hello", "stream": stream}
    assert broken.call("POST", "/v1/completions", body, headers).status_code == 500
    line = logged.last()
    assert (line["level"], line["stop_cause"]) == ("error", "engine_failure")
    assert line["trace"][0] == "Failed"
    assert any("progress" in place for place in line["trace"]), line["trace"]


def test_no_line_metric_or_error_holds_what_was_sent(
    logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """MARK stands in every part of the requests: path, query, headers, body and key."""
    caplog.set_level(logging.DEBUG, logger="server")
    product = logged.product
    good, stranger = product.user("acme"), User(product, "", "", f"sk-chorale-{MARK}")
    headers = {"x-marked": HEADER, "cookie": HEADER}
    chat = {"model": "base", "messages": [{"role": "user", "content": PROMPT}]}
    texts = []
    for user in (good, stranger, product.operator):
        for method, path, body in (
            ("POST", "/v1/chat/completions", chat),
            ("POST", "/v1/chat/completions", chat | {"stream": True}),
            ("POST", "/v1/chat/completions", chat | {"temperature": MARK}),
            ("POST", "/v1/chat/completions", chat | {"messages": [{"role": MARK}]}),
            ("POST", "/v1/completions", {"model": "base", "prompt": PROMPT, "stop": [MARK]}),
            ("POST", "/v1/completions", {"model": "base", "prompt": PROMPT, "n": PROMPT}),
            ("POST", "/v1/adapters:validate", {"files": MARK}),
            ("PUT", f"/v1/uploads/{MARK}/files/{MARK}", None),
            ("GET", f"/v1/usage?start={MARK}", None),
            ("GET", f"/{MARK}?{MARK}", None),
            ("POST", "/admin/v1/tenants", {"name": MARK, "weight": MARK}),
        ):
            answer = user.call(method, path, body, headers)
            if answer.is_error:
                texts.append(answer.text)
    metrics = product.operator.call("GET", "/metrics").text
    assert len(logged.lines) == 34
    ours = [r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "asyncio"))]
    for text in texts:  # errors may repeat a requested name
        assert PROMPT not in text
        assert HEADER not in text
    for text in (json.dumps(logged.lines), *ours, metrics):
        assert MARK not in text
    for text in (json.dumps(logged.lines), *ours, metrics, *texts):
        assert good.api_key not in text
        assert "the-operator" not in text


# ---- the log writer ----


def test_lines_are_json_without_what_is_not_known() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream, "json")
    writer.write({"at": 0, "level": "info", "status": 200, "tenant_id": None})
    writer.write({"at": 1.5, "level": "error", "trace": ["a", "b"]})
    writer.write({"at": 2, "level": "debug"})
    writer.close()
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"at": "1970-01-01T00:00:00.000+00:00", "level": "info", "process": "gateway",
         "status": 200},
        {"at": "1970-01-01T00:00:01.500+00:00", "level": "error", "process": "gateway",
         "trace": ["a", "b"]},
    ]  # fmt: skip


def test_lines_for_people_have_no_names() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream, "text")
    writer.write({"at": 61, "level": "info", "status": 200, "key_id": None, "trace": ["here"]})
    writer.close()
    assert stream.getvalue() == "gateway: 00:01:01 info 200\n    here\n"


def test_a_reader_that_reads_nothing_costs_lines_and_no_request() -> None:
    may_read = threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            may_read.wait()
            return super().write(text)

    stream = Slow()
    writer = LogWriter(stream, "json", max_lines=10)
    for number in range(50):
        writer.write({"at": 0, "number": number})
    assert writer.num_dropped in (39, 40)  # the writer may hold one line
    may_read.set()
    writer.close()
    assert len(stream.getvalue().splitlines()) == 50 - writer.num_dropped


def test_a_reader_that_is_gone_is_no_failure() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    writer = LogWriter(Gone(), "json")
    writer.write({"at": 0})
    writer.write({"at": 0})
    writer.close()
    assert writer.num_dropped == 2


def test_modules_messages_are_lines_too_and_an_exceptions_words_are_not() -> None:
    stream = io.StringIO()
    writer = LogWriter(stream, "json")
    logger = logging.Logger("server.something")
    logger.addHandler(LogHandler(writer))
    try:
        {}[PROMPT]
    except KeyError as error:
        logger.exception("it broke", exc_info=error)
    writer.close()
    line = json.loads(stream.getvalue())
    assert (line["level"], line["logger"], line["message"]) == (
        "error", "server.something", "it broke",
    )  # fmt: skip
    assert line["trace"][0] == "KeyError"
    assert MARK not in stream.getvalue()
