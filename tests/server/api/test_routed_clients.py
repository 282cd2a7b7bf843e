"""Clients of routes that leave, cancel and repeat: which attempts there were, and the bill."""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from engine.errors import EngineDeadError, RequestRefused
from engine.wire.messages import AddRequest, RequestOutput
from server.api import recordings
from server.inference.idempotency import take_over_key
from tests.server.asgi_caller import Caller
from tests.server.in_process import User
from tests.server.routed_world import (
    HEADER,
    answer,
    ask,
    attempts,
    fail,
    give,
    settle,
    shared,
    user,
)
from tests.server.scripted_product import end_at_once

__all__ = ["shared", "user"]  # fixtures that tests use by name


def until_held(
    user: User,
    act: Callable[[], Any],
    body: dict[str, Any],
    headers: Mapping[str, str] = MappingProxyType({}),
) -> httpx.Response:
    """Ask for a route of which a model says nothing; once that one is asked, do `act`.

    The client hangs up if `act` returns "leave".
    """
    caller = Caller(user, body, headers)

    async def run() -> None:
        calling = asyncio.create_task(caller.call())
        await asyncio.wait_for(user.product.engines.begun.wait(), 10)
        if await act() == "leave":
            caller.leaving.set()
        await asyncio.wait_for(calling, 10)

    asyncio.run(run())
    content = b"".join(caller.received)
    return httpx.Response(caller.status, headers=caller.headers, content=content)


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


@pytest.mark.parametrize("route", ["fall", "up"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_hangs_up_ends_the_attempt_and_no_other_begins(
    user: User, route: str, stream: bool
) -> None:
    user.product.engines.held = {"small"}

    async def leave() -> str:
        return "leave"

    assert until_held(user, leave, CHAT | {"model": route, "stream": stream}).status_code == 499
    assert attempts(user) == ["small"]
    assert not user.product.gateway.bases.num_running
    assert not user.product.gateway.bases.parents


@pytest.mark.parametrize("suffix", ["", ".1", ".2"], ids=["parent", "attempt", "a later one"])
@pytest.mark.parametrize("route", ["fall", "up"])
def test_a_cancellation_by_the_parents_or_an_attempts_id_ends_the_request(
    user: User, route: str, suffix: str
) -> None:
    user.product.engines.held = {"small"}

    async def cancel() -> None:
        parent = user.product.engines.asked[0].request_id.removesuffix(".1")
        cancels = user.product.gateway.cancels
        assert not await cancels.cancel("ten_other", f"{parent}{suffix}")
        assert await cancels.cancel(user.tenant_id, f"{parent}{suffix}")

    answered = until_held(user, cancel, CHAT | {"model": route})
    assert (answered.status_code, attempts(user)) == (200, ["small"])
    assert answered.headers[HEADER] == "small;answered"


def test_a_request_that_is_cancelled_between_two_attempts_begins_no_other(user: User) -> None:
    def cancel(message: AddRequest) -> list[RequestOutput | BaseException]:
        (parent,) = user.product.gateway.bases.parents.values()
        parent.is_cancelled = True
        return [EngineDeadError("it died")]

    give(user, small=cancel)
    refused = ask(user, "fall")
    assert (refused.status_code, refused.headers[HEADER]) == (503, "small;unavailable")
    assert attempts(user) == ["small"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_repeat_under_an_idempotency_key_gets_the_same_answer_and_no_attempt(
    user: User, stream: bool
) -> None:
    give(user, small=answer(-9.0))
    key = {"Idempotency-Key": "k"}
    first, again = (ask(user, "up", headers=key, stream=stream) for _ in range(2))
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    assert first.headers[HEADER] == again.headers[HEADER] == "small;weak, large;answered"
    assert attempts(user) == ["small", "large"]
    parent = user.product.engines.asked[0].request_id.removesuffix(".1")
    settle(user)

    def take_over(conn: sa.Connection) -> list[bool]:
        return [take_over_key(conn, f"{parent}{each}") for each in (".1", ".2")]

    taken = user.product.gateway.database.write_sync(take_over)
    assert taken == [True, True], "a gateway that died now would leave the attempts paid"


def test_of_a_gateway_that_stops_nobody_pays_for_attempts_that_led_to_no_answer(
    user: User, monkeypatch
) -> None:
    monkeypatch.setattr(recordings, "_CLOSE_S", 0.0)
    give(user, small=answer(-9.0))
    user.product.engines.held = {"large"}

    async def stop() -> None:
        await user.product.gateway.recorder.close()

    stopped = until_held(user, stop, CHAT | {"model": "up"}, {"Idempotency-Key": "k"})
    assert stopped.status_code == 503
    assert settle(user) == {"1": 0, "2": 0}


def test_a_key_whose_attempts_all_failed_is_free_again(user: User) -> None:
    give(user, small=fail(EngineDeadError()), large=fail(RequestRefused("queue_full")))
    key = {"Idempotency-Key": "k"}
    refused = ask(user, "fall", headers=key)
    assert (refused.status_code, refused.headers[HEADER]) == (
        503,
        "small;unavailable, large;overloaded",
    )
    give(user, large=answer(-0.1))
    assert ask(user, "fall", headers=key).status_code == 200


def test_an_error_that_would_come_again_is_the_answer_of_the_key(user: User) -> None:
    give(user, small=fail(EngineDeadError()))
    give(user, large=end_at_once(finish_reason="error", stop_cause="adapter_not_invoked"))
    key = {"Idempotency-Key": "k"}
    first, again = (ask(user, "fall", headers=key) for _ in range(2))
    assert (first.status_code, first.content) == (400, again.content)
    assert first.headers[HEADER] == again.headers[HEADER] == "small;unavailable, large;refused"
    assert attempts(user) == ["small", "large"]


def test_a_refusal_of_a_later_attempt_is_a_429_also_under_a_key(user: User) -> None:
    path = f"/admin/v1/tenants/{user.name}"
    limits = {"requests_per_minute": 1}
    assert user.product.operator.call("PATCH", path, limits).status_code == 200
    user.product.gateway.identities.forget(user.tenant_id)
    give(user, small=end_at_once(finish_reason="error", stop_cause="engine_failure"))
    refused = ask(user, "fall", headers={"Idempotency-Key": "k"})
    assert (refused.status_code, refused.headers[HEADER]) == (429, "small;failed, large;refused")
