"""A gateway whose models answer as a test scripts, with a ledger that is settled by hand."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from engine.errors import RequestRefused
from engine.wire.delivery import Take
from engine.wire.messages import AddRequest, RequestOutput, TokenLogprobs
from server.billing import ledger
from server.billing.tables import entries, holds
from server.database.clock import now_ms
from server.inference.routes import Routes
from server.limits.memory import MemoryLimiter
from server.pool.suspects import Suspected
from tests.registry.rows import add_version
from tests.server.factories import ENGINE, NOW_MS, make_end
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import InProcess, User

Give = Callable[[AddRequest], list[RequestOutput | BaseException]]
FALLBACK = {"strategy": "fallback", "models": [{"model": "small"}, {"model": "large"}]}
CASCADE = {
    "strategy": "cascade",
    "models": [{"model": "small", "min_mean_logprob": -0.5}, {"model": "large"}],
}
HEADER, ROUTE = "x-chorale-attempts", "x-chorale-route"
_seqs = itertools.count(1)


def answer(*logprobs: float, then: BaseException | None = None) -> Give:
    """Every answer in two tokens, answer i with the mean logprob `logprobs[i]`, then perhaps an
    error instead of the last token.
    """

    def give(message: AddRequest) -> list[RequestOutput | BaseException]:
        params = message.sampling_params
        said: list[RequestOutput | BaseException] = []
        for seq, (place, index) in enumerate(itertools.product((0, 1), range(message.num_answers))):
            mean = logprobs[index % len(logprobs)]
            named = (TokenLogprobs(logprob=mean * (0.5 if place else 1.5)),)
            said.append(
                RequestOutput(
                    request_id=message.request_id,
                    seq=seq,
                    index=index,
                    new_token_ids=(40 + seq,),
                    logprobs=None if params.logprobs is None else named,
                    finish_reason="length" if place else None,
                    stop_cause="max_tokens" if place else None,
                    num_prompt_tokens=message.num_prompt_tokens,
                    num_completion_tokens=seq + 1,
                    adapter_digest=message.adapter.digest if message.adapter else None,
                    is_last=seq + 1 == 2 * message.num_answers,
                )
            )
        return said if then is None else [*said[:-1], then]

    return give


def fail(error: BaseException) -> Give:
    return lambda _: [error]


@dataclass
class JournaledEngines(FakeEngines):
    """Engines that give what the test says of each model, and journal what they gave.

    held: models whose requests wait before their first output, until they are aborted.
    """

    gives: dict[str, Give] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)  # by adapter_id
    held: set[str] = field(default_factory=set)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ends: list[Any] = field(default_factory=list)

    def model_of(self, message: AddRequest) -> str:
        return self.models[message.adapter.adapter_id] if message.adapter else "base"

    async def generate(self, request: AddRequest, name: str, take: Take) -> None:
        self.asked.append(request)
        last, is_refused = None, False
        try:
            if self.model_of(request) in self.held:
                self.begun.set()
                await self.ended.wait()
                last = RequestOutput(
                    request_id=request.request_id,
                    seq=0,
                    finish_reason="abort",
                    stop_cause="aborted",
                    is_last=True,
                )
                take(last)
                return
            for said in self.gives[self.model_of(request)](request):
                if isinstance(said, BaseException):
                    is_refused = isinstance(said, RequestRefused | Suspected)
                    raise said
                last = said
                take(said)
                await asyncio.sleep(0)
        finally:
            if not is_refused:
                self._journal(request, last)

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.ended.set()

    def _journal(self, request: AddRequest, last: RequestOutput | None) -> None:
        """Write what the engine's journal would say of the request's end."""
        fields: dict[str, Any] = {"num_prompt_tokens": 0, "num_completion_tokens": 0}
        if last is not None:
            fields = {
                "num_prompt_tokens": last.num_prompt_tokens,
                "num_completion_tokens": last.num_completion_tokens,
            }
        is_ended = last is not None and last.is_last
        reason, cause = ("error", "engine_failure")
        if is_ended:
            reason, cause = last.finish_reason, last.stop_cause
        self.ends.append(
            make_end(
                next(_seqs),
                request.request_id,
                tenant_id=request.tenant_id,
                adapter_digest=request.adapter.digest if request.adapter else None,
                finish_reason=reason,
                stop_cause=cause,
                **fields,
            )
        )


@pytest.fixture(scope="module")
def shared(shared_product: InProcess) -> InProcess:
    """A gateway whose clocks of limits and routes stand still."""
    gateway = shared_product.gateway
    routes = Routes(gateway.database, monotonic=lambda: 0.0)
    limiter = MemoryLimiter(lambda: NOW_MS)
    shared_product.gateway = replace(gateway, limiter=limiter, routes=routes)
    return shared_product


@pytest.fixture
def user(shared: InProcess) -> User:
    """A tenant with the adapters small and large, and the routes fall and up."""
    user = make_user(shared, small=answer(-0.1), large=answer(-0.1))
    set_route(user, "fall", FALLBACK)
    set_route(user, "up", CASCADE)
    return user


def make_user(shared: InProcess, **gives: Give) -> User:
    """A tenant with an adapter for each name, and engines that give this for them."""
    shared.use(JournaledEngines(gives=gives))
    user = shared.user()
    revision = shared.gateway.bases.default.model.base_revision
    for name in gives:
        adapter_id = shared.gateway.database.write_sync(
            lambda conn, name=name: add_version(conn, user.tenant_id, name, base_revision=revision)
        )
        shared.engines.models[adapter_id] = name
    return user


def set_route(user: User, name: str, body: dict[str, Any]) -> None:
    answer = user.call("PUT", f"/v1/routes/{name}", body)
    assert answer.status_code == 200, answer.text


def give(user: User, **gives: Give) -> None:
    user.product.engines.gives |= gives


def ask(user: User, model: str, **changes: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    headers = changes.pop("headers", None)
    return user.call("POST", "/v1/chat/completions", body | changes, headers)


def attempts(user: User) -> list[str]:
    """The models that engines were asked for, in order."""
    return [user.product.engines.model_of(message) for message in user.product.engines.asked]


def settle(user: User) -> dict[str, int]:
    """Post what the engines journaled. Returns nano-dollars by attempt number, for what is open."""
    gateway, ends = user.product.gateway, user.product.engines.ends
    signer = gateway.signer
    gateway.database.write_sync(lambda conn: ledger.post(conn, signer, ENGINE, ends, now_ms()))
    ends.clear()

    def read(conn: sa.Connection) -> tuple[set[str], int]:
        mine = holds.c.tenant_id == user.tenant_id
        states = set(conn.scalars(sa.select(holds.c.state).where(mine)))
        total = sa.select(sa.func.coalesce(sa.func.sum(entries.c.amount_nanousd), 0))
        return states, conn.scalar(total.where(entries.c.tenant_id == user.tenant_id)) or 0

    states, total = gateway.database.read_sync(read)
    assert "open" not in states
    parent = user.product.engines.asked[0].request_id.partition(".")[0]
    listed = user.call("GET", f"/v1/receipts/{parent}/attempts")
    if listed.status_code == 404:
        assert total == 0
        return {}
    found = listed.json()["data"]
    assert {each["parent_id"] for each in found} == {parent}
    paid = {e["receipt"]["request_id"][-1]: e["receipt"]["amount_nanousd"] for e in found}
    assert sum(paid.values()) == total, "the receipts are all that the ledger has"
    return paid


def cost(usage: dict[str, Any]) -> int:
    return usage["x_chorale"]["cost_nanousd"]
