"""Completions that fail: the client's error, the recorded failure, and the next engine."""

import asyncio
import contextlib
import json
from collections.abc import Iterator

import httpx
import pytest

from engine.errors import EngineAwayError, EngineDeadError, FirstTokenLate
from engine.wire.delivery import Take
from engine.wire.messages import AddRequest, RequestOutput
from server.api.answers import Choice
from server.billing.holds import void_refused
from server.database.clock import now_ms
from tests.server.bases import change_base
from tests.server.factories import NOW_MS
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import make_app
from tests.server.scripted_product import CHAT, Product, answer_all, end_at_once


def test_a_failure_is_no_first_token(scripted: Product) -> None:
    def observed() -> list[str]:
        lines = scripted.gateway.metrics.render().decode().splitlines()
        return [line.split()[-1] for line in lines if "first_token_seconds_count" in line]

    scripted.engines.script = end_at_once(finish_reason="error", stop_cause="adapter_missing")
    scripted.chat()
    assert observed() == []
    scripted.engines.script = answer_all
    scripted.chat()
    assert observed() == ["1.0"]


async def test_a_request_whose_client_leaves_is_counted_as_aborted(scripted: Product) -> None:
    begun = asyncio.Event()

    class Silent(FakeEngines):
        async def generate(self, message: AddRequest, name: str, take: Take) -> None:
            begun.set()
            await asyncio.Event().wait()

    change_base(scripted.gateway, engines=Silent())
    transport = httpx.ASGITransport(make_app(scripted.gateway))
    headers = {"authorization": f"Bearer {scripted.api_key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        asked = client.post("/v1/chat/completions", json=CHAT, headers=headers)
        asking = asyncio.create_task(asked)
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    lines = scripted.gateway.metrics.render().decode().splitlines()
    assert 'chorale_requests_total{base="base",cause="",outcome="abort"} 1.0' in lines


def test_requests_are_counted_by_how_they_ended(scripted: Product) -> None:
    for script in (answer_all, end_at_once(finish_reason="error", stop_cause="adapter_missing")):
        scripted.engines.script = script
        scripted.chat()
    lines = scripted.gateway.metrics.render().decode().splitlines()
    for outcome, cause in (("length", "max_tokens"), ("error", "adapter_missing")):
        named = f'base="base",cause="{cause}",outcome="{outcome}"'
        assert f"chorale_requests_total{{{named}}} 1.0" in lines
    named = f'chorale_tenant_completion_tokens_total{{tenant="{scripted.tenant_id}"}}'
    assert any(line.startswith(named) for line in lines)
    routes = [line for line in lines if line.startswith("chorale_http_requests_total")]
    assert any('route="/v1/chat/completions",status="200"' in line for line in routes)


def test_an_answer_waits_until_its_own_first_token_and_logprobs_of_the_prompt_are_none(
    scripted: Product,
) -> None:
    waiting = []

    def script(message: AddRequest) -> Iterator[RequestOutput]:
        for output in answer_all(message):
            waiting.append(scripted.gateway.bases.default.running.num_waiting(scripted.tenant_id))
            yield output

    scripted.engines.script = script
    assert scripted.text(prompt_logprobs=0, n=2).status_code == 200
    assert waiting == [2, 2, 1, 0, 0, 0, 0]


def test_one_answer_that_fails_fails_the_request(scripted: Product) -> None:
    def script(message: AddRequest) -> list[RequestOutput]:
        said = answer_all(message)[:3]
        return [*said, said[0]._replace(seq=3, finish_reason="error", stop_cause="engine_failure")]

    scripted.engines.script = script
    assert scripted.chat(n=2).status_code == 500
    streamed = scripted.chat(n=2, stream=True)
    assert streamed.status_code == 200
    last = streamed.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert not scripted.gateway.bases.default.running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (EngineDeadError(), "engine_unavailable"),
        (FirstTokenLate(), "first_token_timeout"),
        (RuntimeError("a bug"), "internal_error"),
    ],
)
@pytest.mark.parametrize("num_outputs", [0, 2])
def test_an_answer_that_we_broke_is_noted_before_the_client_hears_of_it(
    scripted: Product, fault, code, stream, num_outputs
) -> None:
    scripted.engines.script = lambda message: [*answer_all(message)[:num_outputs], fault]
    with contextlib.suppress(RuntimeError):  # a server logs it and closes the connection
        answer = scripted.chat(stream=stream)
        assert code in answer.text
    assert scripted.hold().failed_at_ms is not None


def test_a_fault_while_an_answer_is_put_into_words_is_ours(scripted: Product, monkeypatch) -> None:
    def break_down(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Choice, "take", break_down)
    for stream in (False, True):
        with contextlib.suppress(RuntimeError):
            scripted.chat(stream=stream)
        assert scripted.hold().failed_at_ms is not None


# ---- engines that have gone ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_engine_has_gone_is_another_engines_with_its_hold(scripted, stream) -> None:
    scripted.engines.names, scripted.engines.away = ("a", "b"), frozenset("a")
    asked_at_ms = now_ms()
    answer = scripted.chat(stream=stream)
    assert answer.status_code == 200
    assert len(scripted.engines.asked) == 2
    hold, lifetime_ms = scripted.hold(), scripted.gateway.settings.hold_lifetime_s * 1000
    assert (hold.engine_id, hold.state) == ("id of b", "open")
    assert hold.expires_at_ms >= asked_at_ms + lifetime_ms
    assert hold.failed_at_ms is None
    assert b"\nchorale_request_moves_total 1.0\n" in scripted.gateway.metrics.render()


@pytest.mark.parametrize(("names", "num_asked"), [(("a",), 1), (("a", "b"), 3)])
def test_a_request_that_no_engine_takes_is_a_503_that_holds_nothing(
    scripted: Product, monkeypatch, names, num_asked
) -> None:
    settled = []
    monkeypatch.setattr(
        scripted.gateway.limiter, "release", lambda grant, used: settled.append(used)
    )
    scripted.engines.names, scripted.engines.away = names, frozenset(names)
    answer = scripted.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert (scripted.hold().state, scripted.hold().failed_at_ms) == ("voided", None)
    assert settled == [None], "no limit counts it, not even as a request"
    assert len(scripted.engines.asked) == num_asked
    assert len(scripted.gateway.bases.default.running) == 0
    assert {scripted.gateway.bases.default.running.num_at(name) for name in names} == {0}


def test_an_engine_that_died_of_a_request_is_not_followed_by_another(scripted: Product) -> None:
    """The dead engine's journal may hold the request."""
    scripted.engines.names = ("a", "b")
    scripted.engines.script = lambda _: [EngineDeadError("it died")]
    assert scripted.chat().status_code == 503
    assert len(scripted.engines.asked) == 1
    assert (scripted.hold().engine_id, scripted.hold().state) == ("id of a", "open")


def test_a_hold_that_was_resolved_in_the_meantime_is_not_moved(scripted: Product) -> None:
    def script(message):
        scripted.gateway.database.write_sync(
            lambda conn: void_refused(conn, message.request_id, NOW_MS)
        )
        return [EngineAwayError("it leaves")]

    scripted.engines.names, scripted.engines.script = ("a", "b"), script
    assert scripted.chat().status_code == 503
    assert len(scripted.engines.asked) == 1
    assert scripted.hold().engine_id == "id of a"
    assert b"\nchorale_request_moves_total 0.0\n" in scripted.gateway.metrics.render()
