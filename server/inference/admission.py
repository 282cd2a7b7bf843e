"""Everything that may refuse a request before the engine has it, in this order:

    resolve -> load -> tokenize -> wake -> route -> limits -> prefetch -> budget and hold

A base model that sleeps is woken for nobody whom limits, budget or length would refuse: they are
checked before, and charged after.

Any step up to the hold may fail, and then nothing stays charged; but a long prompt is work, and so
is a shape of answers that has to be compiled. Then the request and its seat are charged before, and
stay charged if the tokens or the shape are refused.
What follows is in `server.inference.generation`.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from engine.errors import EngineDeadError
from engine.messages import AddRequest
from registry.catalog import Catalog
from registry.ref import AdapterRef
from server import logs
from server.accounts.auth import Identity
from server.adapters.names import NamedAdapter, resolve_adapter
from server.billing.budgets import BudgetExhausted, cover, note_refusal
from server.billing.holds import Hold, open_hold
from server.billing.price_tags import PriceTags
from server.billing.prices import Price, price_for
from server.billing.rating import amount_nanousd
from server.database.clock import now_ms
from server.database.database import Database, LedgerUnavailable
from server.faults import Fault, Limited, Overloaded, QuotaExceeded, Unavailable
from server.inference import errors, prompts
from server.inference.bases import Bases
from server.inference.drain import Drain
from server.inference.encoders import LARGE_BYTES, Encoders
from server.inference.generation_request import Chat, GenerationRequest
from server.inference.limit_refusals import RefusingLimit
from server.inference.sampling import sampling_of
from server.inference.served_base import ServedBase
from server.inference.texts import Text
from server.limits.adapter_limits import get_adapter_limits
from server.limits.learned import LearnedTokens
from server.limits.memory import MemoryLimiter
from server.limits.rules import SEAT_SLACK_S, Grant, Limit
from server.pool.engines import Engine
from server.pool.keeper import PoolClosed, StillAsleep, TooManyWait
from server.pool.running import RunningRequest
from server.shapes.compiled import CompiledGrammars, Grammar
from server.tools.dialect import Dialect
from server.tools.grammar import AnswerForm
from server.tools.response_template import PLAIN
from server.traces import spans

_GRAMMAR_COST = 10
"""Bytes of prompts that are tokenized in the time of one byte of a schema, if it compiles slowly:
a thousand optional e-mail addresses take 3 us a byte, and a prompt takes 0.3 us a byte.
"""
_REFUSING: dict[type[Fault], RefusingLimit] = {
    QuotaExceeded: "budget",
    Limited: "queue_share",
    Overloaded: "queue",
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds until a request's first token, until its end, and until its hold expires."""

    first_token_s: float
    request_s: float
    hold_lifetime_s: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request with a durable hold.   not_enforced: paths of its demands that nothing enforces."""

    base: ServedBase
    request: GenerationRequest
    message: AddRequest
    text: Text
    form: AnswerForm
    price: Price
    grant: Grant
    running: RunningRequest
    arrived_at: float
    not_enforced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A resolved model name.

    base: the base model, or the adapter's.   named: None for the base.   limits: all that apply.
    """

    base: ServedBase
    named: NamedAdapter | None
    price: Price
    limits: tuple[Limit, ...]

    @property
    def adapter(self) -> AdapterRef | None:
        return self.named.ref if self.named else None


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides whether a request is served, and takes payment for it.

    count_refusal: called for each request that a budget or a queue refuses.
    """

    bases: Bases
    drain: Drain
    encoders: Encoders
    grammars: CompiledGrammars
    catalog: Catalog
    database: Database
    price_tags: PriceTags
    limiter: MemoryLimiter
    learned_tokens: LearnedTokens
    timeouts: Timeouts
    count_refusal: Callable[[RefusingLimit], None]

    @spans.traced("admission")
    async def admit(
        self, identity: Identity, request: GenerationRequest, request_id: str
    ) -> Admitted:
        """Take every step up to the durable hold. Raises Fault, RateLimited and registry errors."""
        try:
            return await self._admit(identity, request, request_id)
        except (QuotaExceeded, Limited, Overloaded) as refused:
            is_held = isinstance(refused, Limited) and refused.scope == "budget"
            self.count_refusal("budget" if is_held else _REFUSING[type(refused)])
            raise

    async def _admit(
        self, identity: Identity, request: GenerationRequest, request_id: str
    ) -> Admitted:
        arrived_at = time.monotonic()
        self.drain.check()
        resolved = await self._resolve(identity, request, request_id)
        base = resolved.base
        _tell(request, request_id, resolved)
        with _visit(base):
            if not base.keeper.is_resting:
                _check_ready(base)
            base.load.check(identity, request.priority, request.num_answers)
            if base.find_text(resolved.named) is None:
                await self.limiter.check(resolved.limits, tokens=1)
            text = await base.text_of(resolved.named, self.encoders, identity.tenant_id)
            begun, message, form, not_enforced = await self._prepare(
                identity, request, resolved, text, request_id
            )
            try:
                if base.keeper.is_resting:
                    await self._check_payable(identity, request, message, resolved, begun)
                await _wake(base, identity.tenant_id)
                # An engine that has just started may say another length than was known before.
                prompts.max_tokens(request, max(map(len, message.prompts)), base.longest)
                engine = _route(base, message)
            except BaseException:
                self._release(begun, None)
                raise
            running = _running(base, request.model, message, engine)
            base.load.add(running)
        try:
            message, grant = await self._pay(identity, request, message, resolved, engine, begun)
        except BaseException:
            base.load.remove(running)
            raise
        base.keeper.note_admitted()
        price = resolved.price
        return Admitted(
            base, request, message, text, form, price, grant, running, arrived_at, not_enforced
        )

    # ---- the steps, in order ----

    @spans.traced("names")
    async def _resolve(
        self, identity: Identity, request: GenerationRequest, request_id: str
    ) -> _Resolved:
        if base := self.bases.named(request.model):
            price = await self.price_tags.of(identity.tenant_id, base.model_id)
            return _Resolved(base, None, price, identity.limits_on(base.model_id))
        request_key = request.request_key or request_id

        def read(conn: Connection) -> _Resolved:
            named = resolve_adapter(
                conn, self.catalog, identity, request.model, request_key=request_key
            )
            # The directory knows the base models that are served, but one may just have gone.
            if (base := self.bases.serving(named.base)) is None:
                raise errors.engine_unavailable()
            adapter_id, tenant_id = named.ref.adapter_id, identity.tenant_id
            price = price_for(
                conn, now_ms(), tenant_id=tenant_id, adapter_id=adapter_id, base_model=base.model_id
            )
            of_base = identity.limits_on(base.model_id)
            of_adapter = get_adapter_limits(conn, adapter_id).limits("adapter", adapter_id)
            return _Resolved(base, named, price, (*of_base, *of_adapter))

        return await self.database.read(read)

    @spans.traced("tokenize")
    async def _prepare(
        self,
        identity: Identity,
        request: GenerationRequest,
        resolved: _Resolved,
        text: Text,
        request_id: str,
    ) -> tuple[Grant | None, AddRequest, AnswerForm, tuple[str, ...]]:
        """Tokenize the prompts and compile the answers' form; what has been charged, the message to
        the engine, the form, and the paths of what is not enforced of it. If either is refused, the
        work that it took stays charged.
        """
        begun = await self._charge_work(identity, request, text, resolved, request_id)
        try:
            encoded = await prompts.tokenize(
                resolved.base, text, self.encoders, identity.tenant_id, request
            )
            form = form_of(request, text.dialect, is_reasoning=encoded.is_reasoning)
            message = self._message(identity, request, encoded, text, resolved, request_id)
            grammar = await self._grammar(identity.tenant_id, form) if form.demands else Grammar("")
        except (Overloaded, Unavailable):
            self._release(begun, None)
            raise
        except BaseException:
            self._release(begun, 0)
            raise
        return begun, replace(message, grammar=grammar.text), form, grammar.not_enforced

    async def _charge_work(
        self,
        identity: Identity,
        request: GenerationRequest,
        text: Text,
        resolved: _Resolved,
        request_id: str,
    ) -> Grant | None:
        """Charge a request and its seat before long prompts are tokenized or a shape is compiled.

        Its tokens, which are not known yet, are charged in `_pay`. Raises RateLimited.
        """
        dialect = text.dialect
        states = (False, True) if dialect.template.reasoning else (False,)
        forms = [form_of(request, dialect, is_reasoning=state) for state in states]
        tenant_id = identity.tenant_id
        is_known = not forms[0].demands or any(self.grammars.get(tenant_id, it) for it in forms)
        if is_known and not prompts.is_long(text, request):
            return None
        least_tokens = prompts.least_tokens(text, request)
        await self.limiter.check(resolved.limits, tokens=least_tokens)
        countable = [limit for limit in resolved.limits if limit.metric != "tokens"]
        return await self._acquire(request_id, countable, 0)

    def _message(
        self,
        identity: Identity,
        request: GenerationRequest,
        encoded: prompts.Prompts,
        text: Text,
        resolved: _Resolved,
        request_id: str,
    ) -> AddRequest:
        """The message to the engine, without its grammar. Raises Invalid."""
        first, *others = encoded.token_ids
        longest = max(map(len, (first, *others)))
        max_tokens = prompts.max_tokens(request, longest, resolved.base.longest)
        return AddRequest(
            request_id=request_id,
            tenant_id=identity.tenant_id,
            prompt_token_ids=tuple(first),
            more_prompts=tuple(map(tuple, others)),
            sampling_params=sampling_of(request, text, encoded, max_tokens),
            token_lease=request.num_answers * max_tokens,
            deadline_s=self.timeouts.request_s,
            first_token_timeout_s=self.timeouts.first_token_s,
            adapter=resolved.adapter,
            cache_salt=identity.cache_salt,
            weight=identity.weight,
            priority=request.priority,
            predicted_token_ids=tuple(encoded.predicted_token_ids[:max_tokens]),
            drafts=request.drafts,
            shares_drafts=request.shares_drafts,
        )

    async def _check_payable(
        self,
        identity: Identity,
        request: GenerationRequest,
        message: AddRequest,
        resolved: _Resolved,
        begun: Grant | None,
    ) -> None:
        """Raise what `_pay` would raise now because of limits or budgets, and charge nothing."""
        limits = _token_limits(resolved.limits) if begun else resolved.limits
        tokens = message.num_prompt_tokens + self._expected_tokens(request, message)
        await self.limiter.check(limits, tokens=tokens)
        if identity.has_hard_budget:
            hold = self._hold(identity, request.model, message, resolved, "")
            await self._write_hold(identity, hold, resolved.price, message, is_check=True)

    async def _grammar(self, tenant_id: str, form: AnswerForm) -> Grammar:
        """The grammar, compiled on a thread unless it is known. Raises Invalid, Overloaded.

        A compilation is always a large job, for 20 bytes may take 70 ms.
        """
        if (grammar := self.grammars.get(tenant_id, form)) is None:
            size_bytes = LARGE_BYTES + _GRAMMAR_COST * form.size_bytes
            grammar = await self.encoders.run(tenant_id, size_bytes, form.compiled)
            self.grammars.keep(tenant_id, form, grammar)
        return grammar

    async def _pay(
        self,
        identity: Identity,
        request: GenerationRequest,
        message: AddRequest,
        resolved: _Resolved,
        engine: Engine,
        begun: Grant | None,
    ) -> tuple[AddRequest, Grant]:
        """Charge every limit, then the budget and the hold in one transaction; or charge nothing.

        begun: what `_charge_work` has charged.
        """
        tokens = message.num_prompt_tokens + self._expected_tokens(request, message)
        grant = await self._charge(message.request_id, resolved.limits, tokens, begun)
        try:
            if message.adapter:
                await engine.prefetch(identity.tenant_id, message.adapter)
            hold = self._hold(identity, request.model, message, resolved, engine.engine_id)
            lease = await self._write_hold(identity, hold, resolved.price, message)
        except BaseException:
            self.limiter.release(grant, None)
            raise
        if lease != message.token_lease:
            message = replace(message, token_lease=lease)
        return message, grant

    @spans.traced("limits")
    async def _charge(
        self, request_id: str, limits: Sequence[Limit], tokens: int, begun: Grant | None
    ) -> Grant:
        """Charge the limits that have not been charged yet. Raises RateLimited; then none is."""
        if begun is None:
            return await self._acquire(request_id, limits, tokens)
        try:
            return begun.joined(await self._acquire(request_id, _token_limits(limits), tokens))
        except BaseException:
            self._release(begun, None)
            raise

    async def _acquire(self, request_id: str, limits: Sequence[Limit], tokens: int) -> Grant:
        lifetime_ms = int((self.timeouts.request_s + SEAT_SLACK_S) * 1000)
        return await self.limiter.acquire(
            request_id, limits, tokens=tokens, lifetime_ms=lifetime_ms
        )

    def _release(self, begun: Grant | None, used_tokens: int | None) -> None:
        """Give the seat of work back.   used_tokens: None to give the request back as well."""
        if begun is not None:
            self.limiter.release(begun, used_tokens)

    def _expected_tokens(self, request: GenerationRequest, message: AddRequest) -> int:
        """Completion tokens to reserve: as asked for, or as learned from this tenant's answers."""
        if request.max_tokens is not None:
            return message.token_lease
        learned = self.learned_tokens.expect(message.tenant_id)
        return min(message.token_lease, message.num_answers * learned)

    def _hold(
        self,
        identity: Identity,
        model: str,
        message: AddRequest,
        resolved: _Resolved,
        engine_id: str,
    ) -> Hold:
        """The hold for the most that the request may cost."""
        now, adapter, price = now_ms(), message.adapter, resolved.price
        num_prompt_tokens, lease = message.num_prompt_tokens, message.token_lease
        return Hold(
            request_id=message.request_id,
            tenant_id=identity.tenant_id,
            key_id=identity.key_id,
            model=model,
            base_model=resolved.base.model_id,
            price_version=price.price_version,
            amount_nanousd=amount_nanousd(num_prompt_tokens, 0, lease, price),
            num_prompt_tokens=num_prompt_tokens,
            token_lease=lease,
            engine_id=engine_id,
            created_at_ms=now,
            expires_at_ms=now + int(self.timeouts.hold_lifetime_s * 1000),
            adapter_id=adapter.adapter_id if adapter else None,
            adapter_version=adapter.version if adapter else None,
            adapter_digest=adapter.digest if adapter else None,
            traceparent=spans.traceparent(),
        )

    @spans.traced("hold")
    async def _write_hold(
        self,
        identity: Identity,
        hold: Hold,
        price: Price,
        message: AddRequest,
        *,
        is_check: bool = False,
    ) -> int:
        """Write the durable hold before the engine hears of the request; its lease in tokens.

        is_check: look whether the budget covers it, and write nothing. Raises QuotaExceeded,
        Limited, Unavailable.
        """

        def write(conn: Connection) -> int | BudgetExhausted:
            covered = hold
            if identity.has_hard_budget:
                try:
                    covered = _covered(conn, hold, price, message.num_answers)
                except BudgetExhausted as refused:
                    # Returned: raised, it would make its whole group run again, and undo the note.
                    note_refusal(conn, identity.tenant_id, refused)
                    return refused
            if not is_check:
                open_hold(conn, covered)
            return covered.token_lease

        try:
            lease = await self.database.write(write, order=identity.tenant_id)
        except LedgerUnavailable:
            raise errors.metering_unavailable() from None
        if isinstance(lease, BudgetExhausted):
            raise errors.budget_exhausted(lease)
        return lease


def _tell(request: GenerationRequest, request_id: str, resolved: _Resolved) -> None:
    """Tell the log and the trace which model it is, now that its name is known to be one."""
    base, adapter = resolved.base.model_id, resolved.adapter
    logs.note(model=base, adapter=adapter.adapter_id if adapter else None)
    spans.note(request_model=request.model, base_model=base, receipt_id=request_id)
    if adapter:
        spans.note(
            adapter_id=adapter.adapter_id,
            adapter_version=adapter.version,
            adapter_digest=adapter.digest,
        )


@contextmanager
def _visit(base: ServedBase) -> Iterator[None]:
    """Keep the base model's engines while a request is decided on. Raises Unavailable."""
    try:
        with base.keeper.visit():
            yield
    except PoolClosed:
        raise errors.model_drained(base.model_id) from None


@spans.traced("wake")
async def _wake(base: ServedBase, tenant_id: str) -> None:
    """Wait for a base model that sleeps. Raises Unavailable and Overloaded, with a Retry-After."""
    try:
        await base.keeper.wake(tenant_id)
    except StillAsleep as error:
        raise errors.model_waking(base.model_id, error.retry_after_s) from None
    except TooManyWait:
        raise errors.overloaded() from None
    _check_ready(base)


def _check_ready(base: ServedBase) -> None:
    if not base.engines.is_ready:
        raise errors.engine_unavailable()


def _token_limits(limits: Sequence[Limit]) -> list[Limit]:
    return [limit for limit in limits if limit.metric == "tokens"]


def _route(base: ServedBase, message: AddRequest) -> Engine:
    """The engine that is to take the request."""
    try:
        return base.engines.route(message)
    except EngineDeadError:
        raise errors.engine_unavailable() from None


def _running(base: ServedBase, name: str, message: AddRequest, engine: Engine) -> RunningRequest:
    adapter = message.adapter
    where = engine.residency.get(adapter.object_key) if adapter else None
    return RunningRequest(
        request_id=message.request_id,
        tenant_id=message.tenant_id,
        num_answers=message.num_answers,
        wanted_tokens=message.token_lease,
        is_cold=adapter is not None and (where is None or where.tier != "device"),
        engine=engine.name,
        adapter=name if adapter else None,
    )


def form_of(request: GenerationRequest, dialect: Dialect, *, is_reasoning: bool) -> AnswerForm:
    """The form that the request's answers must have."""
    if not isinstance(request.prompts, Chat):
        return AnswerForm(PLAIN, None, request.shape, {})
    return AnswerForm(
        dialect.template, request.tool_use, request.shape, dialect.token_ids, is_reasoning
    )


def _covered(conn: Connection, hold: Hold, price: Price, num_answers: int) -> Hold:
    """The hold, cut to what a hard budget has left. Raises BudgetExhausted."""
    lease = cover(
        conn,
        hold.tenant_id,
        price,
        hold.num_prompt_tokens,
        hold.token_lease,
        num_answers=num_answers,
        now_ms=hold.created_at_ms,
    )
    amount = amount_nanousd(hold.num_prompt_tokens, 0, lease, price)
    return replace(hold, token_lease=lease, amount_nanousd=amount)


async def count_request(limiter: MemoryLimiter, identity: Identity) -> Grant:
    """Charge the limits for a request that takes no tokens. Raises RateLimited."""
    limits = [limit for limit in identity.limits if limit.metric == "requests"]
    grant = await limiter.acquire(uuid.uuid4().hex, limits, tokens=0, lifetime_ms=1)
    limiter.release(grant, 0)
    return grant
