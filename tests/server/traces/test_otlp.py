"""Traces of a gateway's requests, as a collector gets them."""

import logging
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from engine.errors import EngineDeadError
from engine.wire.messages import AddRequest, RequestOutput, Timings
from registry.extras import ExtraMissing
from server.api.app import create_app
from server.billing.tables import holds
from server.database.database import DEFAULT_FILE
from server.launch.prepare import prepare, resolve_settings
from server.launch.settings import Settings
from server.traces.otlp import OtlpTracer
from server.traces.spans import Span
from server.version import VERSION
from tests.server.in_process import DEMO, InProcess, User
from tests.server.routed_world import FALLBACK, Give, answer, ask, fail, give, make_user, set_route
from tests.server.scripted_product import end_at_once
from tests.server.traces.collector import Collector, Exported, collecting

MARK = "zebra"
SERVER, INTERNAL = 2, 1
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LINES: list[Mapping[str, Any]] = []
"""The log of the module's gateway."""
TIMINGS = Timings(2e-4, "store", queue_s=1e-4, prefill_s=3e-4, decode_s=4e-4, fetch_s=5e-5)


@dataclass
class Relay:
    """The tracer of the application, which is built once; each test has an exporter of its own."""

    to: OtlpTracer | None = None

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        assert self.to is not None
        return self.to.begin(name, headers)

    def export(self, request: Span) -> None:
        assert self.to is not None
        self.to.export(request)

    def export_late(self, name: str, traceparents: Sequence[str], began_at: float) -> None:
        assert self.to is not None
        self.to.export_late(name, traceparents, began_at)

    def close(self) -> None:
        assert self.to is not None
        self.to.close()


@pytest.fixture(scope="module")
def product(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("traced")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    product = InProcess.build(folder, f"sqlite:///{folder / DEFAULT_FILE}")
    product.gateway = replace(product.gateway, tracer=Relay())
    product._app = create_app(product.gateway, LINES.append)
    yield product
    product.close()


@dataclass
class Traced:
    """A gateway whose requests are traced, and a tenant with the adapters small and large."""

    collector: Collector
    tracer: OtlpTracer
    user: User

    def roots(self) -> list[Exported]:
        """End the export. Returns the requests' spans."""
        self.tracer.close()
        return self.collector.roots()

    def root(self) -> Exported:
        (root,) = self.roots()
        return root


@pytest.fixture
def traced(product: InProcess) -> Iterator[Traced]:
    with collecting() as collector:
        tracer = OtlpTracer(collector.url, 1.0, "host/gateway")
        product.gateway.tracer.to = tracer
        yield Traced(collector, tracer, make_user(product, small=timed(), large=timed()))
        tracer.close()


def timed(*logprobs: float, then: BaseException | None = None) -> Give:
    """An answer of 2 ms at an engine, of which it explains half."""

    def give(message: AddRequest) -> Iterator[RequestOutput | BaseException]:
        *first, last = answer(*(logprobs or (-0.1,)), then=then)(message)
        yield from first
        until = time.monotonic() + 2e-3
        while time.monotonic() < until:
            pass
        if isinstance(last, RequestOutput):
            last = last._replace(timings=TIMINGS, num_cached_tokens=1)
        yield last

    return give


# ---- what a trace says ----


def test_a_streamed_request_with_an_adapter_is_one_trace_under_its_callers_span(
    traced: Traced,
) -> None:
    said = ask(traced.user, "small", stream=True, headers={"traceparent": CALLER})
    root = traced.root()
    assert traced.collector.paths == ["/v1/traces"]
    assert (root.name, root.kind, root.is_error) == ("chat small", SERVER, False)
    assert (root.trace_id, root.parent_id) == tuple(CALLER.split("-")[1:3])
    assert {span.trace_id for span in root.all()} == {root.trace_id}
    assert {span.kind for part in root.parts for span in part.all()} == {INTERNAL}
    (message,) = traced.user.product.engines.asked
    assert message.adapter is not None
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "chorale",
        "gen_ai.request.model": "small",
        "gen_ai.response.model": "small",
        "gen_ai.response.id": f"chatcmpl-{message.request_id}",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": message.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 2,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "chorale.request_id": said.headers["x-request-id"],
        "chorale.receipt_id": message.request_id,
        "chorale.tenant_id": traced.user.tenant_id,
        "chorale.key_id": traced.user.api_key.split("-")[2],
        "chorale.base_model": "base",
        "chorale.adapter_id": message.adapter.adapter_id,
        "chorale.adapter_version": 1,
        "chorale.adapter_digest": message.adapter.digest,
        "chorale.engine": "engine",
        "chorale.stop_cause": "max_tokens",
    }
    assert traced.collector.resource() == {
        "service.name": "chorale",
        "service.version": VERSION,
        "service.instance.id": "host/gateway",
        "chorale.gen_ai_conventions": "0.1.0",
    }


def test_its_spans_nest_and_follow_one_another_and_say_what_the_engine_says(
    traced: Traced,
) -> None:
    ask(traced.user, "small", stream=True)
    root = traced.root()
    assert root.names == ["admission", "engine"]
    assert root.part("admission").names == ["names", "tokenize", "wake", "limits", "hold"]
    engine = root.part("engine")
    assert engine.names == ["load", "queue", "prefill", "decode"]
    load = engine.part("load")
    assert load.attributes == {"chorale.load_tier": "store"}
    assert (load.names, load.parts[0].began_ns) == (["fetch"], load.began_ns)
    assert load.parts[0].seconds == pytest.approx(TIMINGS.fetch_s, abs=1e-6)
    told = (TIMINGS.load_s, TIMINGS.queue_s, TIMINGS.prefill_s, TIMINGS.decode_s)
    assert [part.seconds for part in engine.parts] == pytest.approx(told, abs=1e-6)
    for span in root.all():
        assert span.began_ns <= span.ended_ns
        for part in span.parts:
            assert span.began_ns <= part.began_ns
            assert part.ended_ns <= span.ended_ns
        for one, next_one in zip(span.parts, span.parts[1:], strict=False):
            assert one.ended_ns <= next_one.began_ns
        assert sum(part.seconds for part in span.parts) <= span.seconds


def test_answer_log_line_and_hold_say_where_a_request_is_in_its_trace(traced: Traced) -> None:
    said = ask(traced.user, "small", headers={"traceparent": CALLER})
    _, trace_id, span_id, flags = said.headers["traceparent"].split("-")
    root = traced.root()
    assert (trace_id, span_id, flags) == (root.trace_id, root.span_id, "01")
    assert LINES[-1]["trace_id"] == trace_id
    assert held(traced.user) == [said.headers["traceparent"]]


def test_a_request_that_is_not_traced_has_no_late_spans(traced: Traced) -> None:
    said = ask(traced.user, "small", headers={"traceparent": f"{CALLER[:-2]}00"})
    assert said.headers["traceparent"].endswith("-00")
    assert held(traced.user) == [None]


def held(user: User) -> list[str | None]:
    query = sa.select(holds.c.traceparent).where(holds.c.tenant_id == user.tenant_id)
    return user.product.gateway.database.read_sync(lambda conn: list(conn.scalars(query)))


def test_work_that_is_done_later_is_a_span_of_its_request_even_from_another_process() -> None:
    with collecting() as collector:
        first, second = (OtlpTracer(collector.url, 1.0, name) for name in ("first", "second"))
        request = first.begin("chat", {})
        request.end()
        first.export(request)
        first.close()
        assert request.traceparent
        second.export_late("settle", [request.traceparent], time.monotonic() - 0.1)
        second.close()
        (root,) = collector.roots()
        assert root.names == ["settle"]
        assert root.part("settle").seconds >= 0.099, "it began a tenth of a second ago"


def test_an_engine_that_says_more_than_was_seen_of_it_still_nests(traced: Traced) -> None:
    hours = Timings(queue_s=3600.0, prefill_s=3600.0, decode_s=1e-5)
    give(traced.user, small=lambda m: [answer(-0.1)(m)[-1]._replace(timings=hours)])
    ask(traced.user, "small")
    engine = traced.root().part("engine")
    assert sorted(engine.names) == ["decode", "prefill", "queue"]
    assert all(part.began_ns >= engine.began_ns for part in engine.parts)


def test_a_routes_attempts_are_spans_within_its_requests(traced: Traced) -> None:
    set_route(traced.user, "fall", FALLBACK)
    give(traced.user, small=fail(EngineDeadError("it died")))
    # With so many answers the attempt has begun to answer long before its last token.
    assert ask(traced.user, "fall", stream=True, n=8).status_code == 200
    root = traced.root()
    assert (root.name, root.is_error, root.names) == ("chat fall", False, ["attempt", "attempt"])
    assert root.attributes["chorale.attempts"] == 2
    assert "error.type" not in root.attributes
    first, second = root.parts
    request_id = traced.user.product.engines.asked[0].request_id.removesuffix(".1")
    for attempt, model, place in ((first, "small", 1), (second, "large", 2)):
        assert attempt.attributes["gen_ai.request.model"] == model
        assert attempt.attributes["chorale.receipt_id"] == f"{request_id}.{place}"
        assert attempt.names == ["admission", "engine"]
        assert attempt.ended_ns >= attempt.part("engine").ended_ns
    assert (first.is_error, first.attributes["error.type"]) == (True, "engine_unavailable")
    assert first.part("engine").names == []
    assert (second.is_error, second.attributes["gen_ai.usage.output_tokens"]) == (False, 16)
    assert second.part("engine").names == ["load", "queue", "prefill", "decode"]


def test_a_recorded_answer_is_traced_and_its_repeat_reaches_no_engine(traced: Traced) -> None:
    for _ in range(2):
        ask(traced.user, "small", headers={"idempotency-key": "once"})
    first, repeat = traced.roots()
    assert (first.name, first.names) == ("chat small", ["admission", "engine"])
    assert (repeat.name, repeat.names) == ("chat", [])
    assert repeat.attributes["http.response.status_code"] == 200


# ---- failures ----

LONG = {"messages": [{"role": "user", "content": "hi " * 2000}]}


@pytest.mark.parametrize(
    ("asked", "status", "error", "parts"),
    [
        ({"temperature": "warm"}, 400, "400", []),
        ({"key": "sk-chorale-none"}, 401, "invalid_api_key", []),
        ({"model": MARK}, 404, "model_not_found", ["admission"]),
        (LONG, 400, "context_length_exceeded", ["admission"]),
    ],
)
def test_a_refused_request_says_why_and_is_no_error_of_the_server(
    traced: Traced, asked: dict[str, Any], status: int, error: str, parts: Any
) -> None:
    asked = {"model": "small", **asked}
    user = replace(traced.user, api_key=asked.pop("key", traced.user.api_key))
    assert ask(user, **asked).status_code == status
    root = traced.root()
    assert root.attributes["error.type"] == error
    assert root.attributes["http.response.status_code"] == status
    assert root.names == parts
    assert not root.is_error
    assert all(part.is_error for part in root.parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        (timed(then=EngineDeadError("it died")), "engine_unavailable"),
        (end_at_once(finish_reason="error", stop_cause="engine_failure"), "internal_error"),
        (timed(then=KeyError(MARK)), None),
    ],
    ids=["dead", "failed", "ours"],
)
def test_a_failed_request_is_an_error_even_if_its_stream_had_begun(
    traced: Traced, given: Give, error: str | None, stream: bool
) -> None:
    give(traced.user, small=given)
    try:
        ask(traced.user, "small", stream=stream)
    except KeyError:  # the connection is closed
        assert error is None
    root = traced.root()
    assert root.is_error
    assert root.part("engine").is_error
    ours = "KeyError" if stream else "internal_error"
    assert root.attributes["error.type"] == (error or ours)
    assert root.part("engine").attributes["error.type"] == (error or "KeyError")


# ---- what leaves, and what waits ----


def test_nothing_that_was_sent_or_answered_leaves_in_a_trace(traced: Traced) -> None:
    user = traced.user
    answered = ask(user, "small").json()["choices"][0]["message"]["content"]
    for changes in (
        {"messages": [{"role": "user", "content": f"{MARK} in a prompt"}], "stop": [MARK]},
        {"model": MARK},
        {"temperature": MARK},
        {"headers": {"x-marked": MARK, "traceparent": MARK, "baggage": f"a={MARK}"}},
        {"headers": {"x-client-request-id": MARK, "idempotency-key": MARK}},
    ):
        ask(user, **{"model": "small", **changes})
    give(user, small=timed(then=KeyError(MARK)))
    ask(user, "small")
    assert len(traced.roots()) == 7
    exported = b"".join(traced.collector.bodies)
    assert answered
    for text in (MARK, answered, user.api_key):
        assert text.encode() not in exported


def test_a_collector_that_hangs_delays_no_request_and_costs_only_spans(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    traced.collector.may_answer.clear()
    tracer = OtlpTracer(traced.collector.url, 1.0, "slow", delay_s=1e-3, max_spans=16)
    traced.user.product.gateway.tracer.to = tracer
    ask(traced.user, "small")
    assert traced.collector.asked.wait(30)
    for _ in range(4):
        assert ask(traced.user, "small").status_code == 200
    assert not traced.collector.bodies, "the collector has answered nothing yet"
    traced.collector.may_answer.set()
    tracer.close()
    assert 13 <= len(traced.collector.spans()) <= 13 + 16
    assert any("Queue full" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("ratio", "caller", "is_traced"),
    [(1.0, None, True), (0.0, None, False), (0.0, "01", True), (1.0, "00", False)],
)
def test_a_callers_decision_wins_over_the_ratio(
    ratio: float, caller: str | None, is_traced: bool
) -> None:
    headers = {"traceparent": CALLER[:-2] + caller} if caller else {}
    with collecting() as collector:
        tracer = OtlpTracer(collector.url, ratio, "one")
        request = tracer.begin("chat", headers)
        request.part("engine", takes_notes=False).end()
        tracer.export(request)
        tracer.close()
        assert len(collector.spans()) == 2 * is_traced


def test_the_setting_without_the_extra_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = "opentelemetry.exporter.otlp.proto.http"
    monkeypatch.setitem(sys.modules, exporter, None)
    url = "http://localhost:4318"
    settings = Settings(model=str(DEMO), data_dir=tmp_path, port=0, otlp_endpoint=url)
    with pytest.raises(ExtraMissing, match=r"pip install -e '\.\[otel\]'"):
        prepare(resolve_settings(settings))
