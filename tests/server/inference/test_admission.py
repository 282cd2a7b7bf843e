"""A request that is refused at any step of its admission leaves nothing charged or running."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from engine.errors import EngineAwayError
from engine.wire.messages import AddRequest
from registry.errors import Overloaded
from registry.ref import AdapterRef
from server.inference.encoders import Encoders
from server.limits.memory import MemoryLimiter
from tests.registry.publishing import publish
from tests.server.factories import NOW_MS, limit_budget
from tests.server.fake_engines import FakeEngine, FakeEngines
from tests.server.in_process import InProcess, User

T = TypeVar("T")
LONG = "Good day to you. " * 300
LIMITS = {"requests_per_minute": 9, "tokens_per_minute": 1000, "max_concurrency": 3}
ADDED = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
OWN = {"added_tokens": [ADDED | {"id": 2048, "content": "<new>"}]}


class Failing(FakeEngines):
    """Engines that fail at one step, which is the name of a method, or whose client leaves then."""

    fails_at = ""
    error: BaseException = EngineAwayError("it has gone")

    def _pass(self, step: str) -> None:
        if step == self.fails_at:
            raise self.error

    def route(self, request: AddRequest, besides: str | None = None) -> FakeEngine:
        self._pass("route")
        return super().route(request, besides)

    async def prefetch(self, tenant_id: str, adapter: AdapterRef) -> None:
        self._pass("prefetch")


class Full(Encoders):
    async def run(self, tenant_id: str, size_bytes: int, work: Callable[[], T]) -> T:
        raise Overloaded()


@pytest.fixture
def user(product: InProcess) -> User:
    """A tenant with limits and an adapter of its own tokenizer; the limiter's clock stands still.

    500 tokens of its limit are used.
    """
    product.gateway = replace(product.gateway, limiter=MemoryLimiter(lambda: NOW_MS))
    product.use(Failing())
    user, tokenizer = product.user("acme", **LIMITS), json.dumps(OWN)
    product.gateway.database.write_sync(
        lambda c: publish(product.gateway.catalog, c, user.tenant_id, "own", tokenizer=tokenizer)
    )
    assert user.complete("base", prompt=[5] * 497).status_code == 200
    return user


def fail(user: User, step: str) -> None:
    """Have a step of the user's next request fail."""
    product: Any = user.product
    if step == "encode":
        product.gateway = replace(product.gateway, encoders=Full())
    elif step == "hold":
        limit_budget(product.gateway.database, user.tenant_id, 9)
        product.gateway.identities.forget(user.tenant_id)
    else:
        product.engines.fails_at = step


def standings(user: User) -> Any:
    """The tenant's limits as it sees them: what is left of each, and which requests hold of it."""
    return user.call("GET", "/v1/limits").json()


@pytest.mark.parametrize("prompt", ["Hi", LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("step", "code"),
    [
        ("encode", None),
        ("route", "engine_unavailable"),
        ("tokens", "rate_limit_exceeded"),
        ("prefetch", "engine_unavailable"),
        ("hold", "insufficient_quota"),
    ],
)
def test_nothing_stays_charged_of_a_request_that_any_step_refuses(
    user: User, step: str, code: str | None, prompt: str
) -> None:
    before = standings(user)
    fail(user, step)
    most = 502 if step == "tokens" else 9
    # The adapter's tokenizer is made on a thread, before there is any work for the prompt.
    model = "base" if step == "encode" and prompt == LONG else "own"
    answer = user.complete(model, prompt=prompt, truncate_prompt_tokens=9, max_tokens=most)
    assert answer.json()["error"]["code"] == code
    assert standings(user) == before
    assert not user.product.gateway.bases.num_running


def test_nothing_stays_charged_of_a_request_whose_client_leaves(user: User) -> None:
    before = standings(user)
    engines: Any = user.product.engines
    engines.fails_at, engines.error = "prefetch", asyncio.CancelledError()
    with contextlib.suppress(asyncio.CancelledError):
        user.complete("own")
    assert standings(user) == before
    assert not user.product.gateway.bases.num_running
