"""A request before the engine: everything that may still refuse it, in order.

    load -> resolve -> tokenize -> route -> limits -> prefetch -> budget and hold

Everything up to the hold is free to fail, and nothing stays charged. What follows is in
`server.inference.generation`.
"""

import time
import uuid
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from engine.errors import EngineDeadError
from engine.messages import AddRequest
from registry.ref import AdapterRef
from server.accounts.auth import Identity
from server.adapters.names import resolve_model
from server.api import errors
from server.api.answers import Answer
from server.api.openai import ChatRequest
from server.billing.budgets import BudgetExhausted, cover
from server.billing.holds import Hold, open_hold
from server.billing.prices import Price, price_for
from server.billing.rating import amount_nanousd
from server.database.clock import now_ms
from server.database.database import LedgerUnavailable
from server.gateway import Gateway
from server.inference import prompts
from server.inference.prompts import Asked
from server.limits.adapter_limits import get_adapter_limits
from server.limits.epochs import StaleEpoch
from server.limits.epochs import check as check_epoch
from server.limits.rules import SEAT_SLACK_S, Grant, Limit
from server.pool.running import RunningRequest

_MAX_EPOCHS = 3
"""How often one request may be charged because the way of counting changed; then it is refused."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that has been admitted and paid for: its hold is durable."""

    asked: Asked
    message: AddRequest
    answer: Answer
    price: Price
    grant: Grant
    running: RunningRequest
    arrived_at: float


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A model's name, resolved. adapter: None for the base.   limits: all that apply."""

    adapter: AdapterRef | None
    price: Price
    limits: tuple[Limit, ...]


async def admit(gateway: Gateway, identity: Identity, asked: Asked) -> Admitted:
    """Everything up to the durable hold. Raises ApiError, RateLimited and the registry's errors."""
    arrived_at = time.monotonic()
    request_id = uuid.uuid4().hex
    if not gateway.engines.is_ready:
        raise errors.engine_unavailable()
    gateway.load.check(identity, asked.priority, asked.num_answers)
    resolved = await _resolve(gateway, identity, asked, request_id)
    if prompts.is_long(asked):
        await gateway.limiter.check(resolved.limits)
    first, *others = await prompts.tokenize(gateway, asked)
    asked.check_token_ids(gateway.vocabulary_size)
    max_tokens = prompts.max_tokens(gateway, asked, max(map(len, (first, *others))))
    message = AddRequest(
        request_id=request_id,
        tenant_id=identity.tenant_id,
        prompt_token_ids=tuple(first),
        more_prompts=tuple(map(tuple, others)),
        sampling_params=asked.sampling(max_tokens),
        token_lease=asked.n * (1 + len(others)) * max_tokens,
        deadline_s=gateway.settings.request_timeout_s,
        first_token_timeout_s=gateway.settings.first_token_timeout_s,
        adapter=resolved.adapter,
        cache_salt=identity.cache_salt,
        weight=identity.weight,
        priority=asked.priority,
    )
    running = _running(gateway, message, _route(gateway, message))
    gateway.load.add(running)
    try:
        message, grant = await _pay(gateway, identity, asked, message, resolved, running.engine)
    except BaseException:
        gateway.load.remove(running)
        raise
    answer = Answer.of(
        request_id,
        asked.model,
        isinstance(asked, ChatRequest),
        gateway.base.base_revision,
        asked.served_tier,
    )
    return Admitted(asked, message, answer, resolved.price, grant, running, arrived_at)


async def count_request(gateway: Gateway, identity: Identity) -> Grant:
    """Charge a request that takes no tokens. Raises RateLimited."""
    limits = [limit for limit in identity.limits if limit.metric == "requests"]
    grant = await gateway.limiter.acquire(uuid.uuid4().hex, limits, tokens=0, lease_ms=1)
    gateway.limiter.settle(grant, 0)
    return grant


# ---- the steps, in order ----


async def _resolve(
    gateway: Gateway, identity: Identity, asked: Asked, request_id: str
) -> _Resolved:
    if asked.model == gateway.catalog.base.model_id:
        price = await gateway.price_tags.of(identity.tenant_id)
        return _Resolved(None, price, identity.limits)
    request_key = asked.request_key or request_id

    def read(conn: Connection) -> _Resolved:
        named = resolve_model(conn, gateway.catalog, identity, asked.model, request_key=request_key)
        ref = named.ref if named else None
        adapter_id = ref.adapter_id if ref else None
        price = price_for(conn, now_ms(), tenant_id=identity.tenant_id, adapter_id=adapter_id)
        limits = get_adapter_limits(conn, adapter_id).of(adapter_id) if adapter_id else ()
        return _Resolved(ref, price, (*identity.limits, *limits))

    return await gateway.database.read(read)


def _route(gateway: Gateway, message: AddRequest) -> str:
    """The name of the engine to take it."""
    try:
        return gateway.engines.route(message)
    except EngineDeadError:
        raise errors.engine_unavailable() from None


def _running(gateway: Gateway, message: AddRequest, engine: str) -> RunningRequest:
    adapter = message.adapter
    where = gateway.engines.residency(adapter.object_key, engine) if adapter else None
    return RunningRequest(
        request_id=message.request_id,
        tenant_id=message.tenant_id,
        num_answers=message.num_answers,
        wanted_tokens=message.token_lease,
        is_cold=adapter is not None and (where is None or where.tier != "device"),
        engine=engine,
    )


async def _pay(
    gateway: Gateway,
    identity: Identity,
    asked: Asked,
    message: AddRequest,
    resolved: _Resolved,
    engine: str,
) -> tuple[AddRequest, Grant]:
    """Charge every limit, then the budget and the hold in one transaction; or nothing of it.

    A hold under another epoch than its limits were charged in is refused: then both, once more.
    """
    for _ in range(_MAX_EPOCHS):
        grant = await gateway.limiter.acquire(
            message.request_id,
            resolved.limits,
            tokens=message.num_prompt_tokens + _expected_tokens(gateway, asked, message),
            lease_ms=int((message.deadline_s + SEAT_SLACK_S) * 1000),
        )
        try:
            if message.adapter:
                await gateway.engines.prefetch(identity.tenant_id, message.adapter, engine)
            price = resolved.price
            return await _hold(gateway, identity, asked, message, price, grant, engine), grant
        except StaleEpoch:
            gateway.limiter.settle(grant, None)
            await gateway.limiter.refresh()
        except BaseException:
            gateway.limiter.settle(grant, None)
            raise
    raise errors.overloaded()


def _engine_id(gateway: Gateway, engine: str) -> str:
    """Whose journal will have it."""
    try:
        return gateway.engines.engine_id(engine)
    except EngineDeadError:
        raise errors.engine_unavailable() from None


def _expected_tokens(gateway: Gateway, asked: Asked, message: AddRequest) -> int:
    """Completion tokens to reserve: what was asked for, or what this tenant's requests come to."""
    if asked.asked_tokens is not None:
        return message.token_lease
    learned = gateway.learned_tokens.expect(message.tenant_id)
    return min(message.token_lease, message.num_answers * learned)


async def _hold(
    gateway: Gateway,
    identity: Identity,
    asked: Asked,
    message: AddRequest,
    price: Price,
    grant: Grant,
    engine: str,
) -> AddRequest:
    """One durable row before the engine hears of it; the message, with the lease that it covers.

    Raises ApiError, StaleEpoch.
    """
    num_prompt_tokens, now = message.num_prompt_tokens, now_ms()
    adapter, engine_id = message.adapter, _engine_id(gateway, engine)

    def write(conn: Connection) -> int | BudgetExhausted | StaleEpoch:
        try:
            check_epoch(conn, grant.epoch)
            lease = message.token_lease
            if identity.has_hard_budget:
                lease = cover(
                    conn,
                    identity.tenant_id,
                    price,
                    num_prompt_tokens,
                    lease,
                    num_answers=message.num_answers,
                    now_ms=now,
                )
        except (BudgetExhausted, StaleEpoch) as refused:
            # Returned, for nothing was written: raised, its neighbours would have to run again.
            return refused
        hold = Hold(
            request_id=message.request_id,
            tenant_id=identity.tenant_id,
            key_id=identity.key_id,
            model=asked.model,
            price_version=price.price_version,
            amount_nanousd=amount_nanousd(num_prompt_tokens, 0, lease, price),
            num_prompt_tokens=num_prompt_tokens,
            token_lease=lease,
            engine_id=engine_id,
            created_at_ms=now,
            expires_at_ms=now + int(gateway.settings.hold_lifetime_s * 1000),
            adapter_id=adapter.adapter_id if adapter else None,
            adapter_version=adapter.version if adapter else None,
            adapter_digest=adapter.digest if adapter else None,
        )
        open_hold(conn, hold)
        return lease

    try:
        lease = await gateway.database.write(write, order=identity.tenant_id)
    except LedgerUnavailable:
        raise errors.metering_unavailable() from None
    if isinstance(lease, BudgetExhausted):
        raise errors.insufficient_quota(str(lease))
    if isinstance(lease, StaleEpoch):
        raise lease
    return message if lease == message.token_lease else replace(message, token_lease=lease)
