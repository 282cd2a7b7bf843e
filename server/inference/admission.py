"""Everything that may refuse a request before the engine has it, in this order:

    resolve -> load -> tokenize -> wake -> route -> limits -> prefetch -> budget and hold

Each step takes the request's ticket and adds to it. A base model that sleeps is woken for nobody
whom limits, budget or length would refuse: they are checked before, and charged after.

Any step up to the hold may fail, and then nothing stays charged; but a long prompt is work, and so
is a constraint of answers that has to be compiled. Then the request and its seat are charged
before, and stay charged if the tokens or the constraint are refused. What follows is in
`server.inference.generation`.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection

from engine.errors import EngineDeadError
from registry.catalog.catalog import Catalog
from registry.errors import Limited, Overloaded, QuotaExceeded, Unavailable
from server import logs
from server.accounts.auth import Identity
from server.adapters.names import resolve_adapter
from server.billing.budgets import BudgetExhausted, BudgetHeld, cover, note_refusal
from server.billing.holds import Hold, open_hold
from server.billing.price_tags import PriceTags
from server.billing.prices import Price, price_for
from server.billing.rating import amount_nanousd
from server.constraints.compiled import Grammar
from server.database.clock import now_ms
from server.database.database import Database, LedgerUnavailable
from server.inference import errors, prompts
from server.inference.bases import Bases
from server.inference.drain import Drain
from server.inference.encoders import LARGE_BYTES, Encoders
from server.inference.generation_request import GenerationRequest
from server.inference.limit_refusals import RefusingLimit
from server.inference.served_base import ServedBase
from server.inference.shared_cache import SharedCache
from server.inference.ticket import (
    Ticket,
    Timeouts,
    form_of,
    hold_of,
    message_of,
    running_of,
    tokens_of,
)
from server.limits.adapter_limits import get_adapter_limits
from server.limits.learned import LearnedTokens
from server.limits.memory import MemoryLimiter
from server.limits.rules import SEAT_SLACK_S, Grant, Limit
from server.tools.grammar import AnswerForm
from server.traces import spans

_GRAMMAR_COST = 10
"""Bytes of prompts that are tokenized in the time of one byte of a schema, if it compiles slowly:
a thousand optional e-mail addresses take 3 us a byte, and a prompt takes 0.3 us a byte.
"""
_MAX_GRAMMARS = 512
"""About 130 MiB if all are as long as they may be."""
_TENANT_GRAMMARS = 32


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides whether a request is served, and takes payment for it.

    count_refusal: called for each request that a budget or a queue refuses.
    grammars: those that were compiled, by tenant and the digest of their form.
    """

    bases: Bases
    drain: Drain
    encoders: Encoders
    catalog: Catalog
    database: Database
    price_tags: PriceTags
    limiter: MemoryLimiter
    learned_tokens: LearnedTokens
    timeouts: Timeouts
    count_refusal: Callable[[RefusingLimit], None]
    grammars: SharedCache[bytes, Grammar] = field(
        default_factory=lambda: SharedCache(_MAX_GRAMMARS, _TENANT_GRAMMARS)
    )

    @spans.traced("admission")
    async def admit(
        self,
        identity: Identity,
        request: GenerationRequest,
        request_id: str,
        timeouts: Timeouts | None = None,
    ) -> Ticket:
        """Take every step up to the durable hold. Raises Fault, RateLimited and registry errors.

        timeouts: other ones than those of all requests.
        """
        ticket = Ticket(identity, request, request_id, timeouts or self.timeouts)
        try:
            await self._admit(ticket)
        except EngineDeadError:
            raise errors.engine_unavailable() from None
        except (QuotaExceeded, Limited, Overloaded) as refused:
            self.count_refusal(_refusing(refused))
            raise
        return ticket

    async def _admit(self, ticket: Ticket) -> None:
        self.drain.check()
        await self._resolve(ticket)
        _tell(ticket)
        base, request = ticket.base, ticket.request
        with ExitStack() as undo:
            undo.push(lambda _type, error, _traceback: self._give_back(ticket, error))
            with base.keeper.visit():
                if not base.keeper.is_resting:
                    _check_ready(base)
                base.load.check(ticket.identity, request.priority, request.num_answers)
                await self._find_text(ticket)
                await self._encode(ticket)
                if base.keeper.is_resting:
                    await self._check_payable(ticket)
                await _wake(ticket)
                # An engine that has just started may say another length than was known before.
                prompts.max_tokens(request, max(map(len, ticket.message.prompts)), base.longest)
                engine = base.engines.route(ticket.message)
                ticket.running = running_of(ticket, engine)
                base.load.add(ticket.running)
                undo.callback(base.load.remove, ticket.running)
            await self._charge_rest(ticket)
            if ticket.adapter:
                await engine.prefetch(ticket.tenant_id, ticket.adapter)
            lease = await self._write_hold(ticket, engine.engine_id)
            if lease != ticket.message.token_lease:
                ticket.message = replace(ticket.message, token_lease=lease)
            undo.pop_all()
        base.keeper.note_admitted()

    def _give_back(self, ticket: Ticket, error: BaseException | None) -> None:
        """Give back what a request that is not admitted was charged; of one for which work was
        done, its seat.
        """
        is_worked = ticket.is_at_work and not isinstance(error, Overloaded | Unavailable)
        self.limiter.release(ticket.grant, 0 if is_worked else None)

    # ---- the steps, in order ----

    @spans.traced("names")
    async def _resolve(self, ticket: Ticket) -> None:
        """Find the base model, the adapter, the price and the limits of the model that is named."""
        identity, name = ticket.identity, ticket.request.model
        if base := self.bases.named(name):
            ticket.base, ticket.limits = base, identity.limits_on(base.model_id)
            ticket.price = await self.price_tags.of(identity.tenant_id, base.model_id)
            return
        request_key = ticket.request.request_key or ticket.request_id

        def read(conn: Connection) -> None:
            named = resolve_adapter(conn, self.catalog, identity, name, request_key=request_key)
            # The directory knows the base models that are served, but one may just have gone.
            if (base := self.bases.serving(named.base)) is None:
                raise errors.engine_unavailable()
            adapter_id, model_id, now = named.ref.adapter_id, base.model_id, now_ms()
            ticket.base, ticket.named = base, named
            ticket.price = price_for(
                conn, now, tenant_id=ticket.tenant_id, adapter_id=adapter_id, base_model=model_id
            )
            of_adapter = get_adapter_limits(conn, adapter_id).limits("adapter", adapter_id)
            ticket.limits = (*identity.limits_on(model_id), *of_adapter)

        await self.database.read(read)

    async def _find_text(self, ticket: Ticket) -> None:
        """Find the tokenizer and the template; where they have to be made first, limits come first.

        Raises RateLimited, Overloaded, Unavailable.
        """
        if ticket.base.find_text(ticket.named) is None:
            await self.limiter.check(ticket.limits, tokens=1)
        ticket.text = await ticket.base.text_of(ticket.named, self.encoders, ticket.tenant_id)

    @spans.traced("tokenize")
    async def _encode(self, ticket: Ticket) -> None:
        """Tokenize the prompts and compile the answers' form: make the message to the engine."""
        request, text, tenant_id = ticket.request, ticket.text, ticket.tenant_id
        await self._charge_work(ticket)
        ticket.is_at_work = True
        encoded = await prompts.tokenize(ticket.base, text, self.encoders, tenant_id, request)
        form = ticket.form = form_of(request, text.dialect, is_reasoning=encoded.is_reasoning)
        ticket.message = message_of(ticket, encoded)
        if form.demands:
            grammar = await self._grammar(tenant_id, form)
            ticket.message = replace(ticket.message, grammar=grammar.text)
            ticket.not_enforced = grammar.not_enforced
        ticket.is_at_work = False

    async def _charge_work(self, ticket: Ticket) -> None:
        """Charge a request and its seat before long prompts are tokenized or a grammar is compiled.

        Its tokens, which are not known yet, are charged later. Raises RateLimited.
        """
        request, text, tenant_id = ticket.request, ticket.text, ticket.tenant_id
        states = (False, True) if text.dialect.template.reasoning else (False,)
        forms = [form_of(request, text.dialect, is_reasoning=state) for state in states]
        is_known = not forms[0].demands or any(
            self.grammars.get(tenant_id, it.digest) for it in forms
        )
        if is_known and not prompts.is_long(text, request):
            return
        await self.limiter.check(ticket.limits, tokens=prompts.least_tokens(text, request))
        await self._charge(ticket, [it for it in ticket.limits if it.metric != "tokens"], 0)

    async def _grammar(self, tenant_id: str, form: AnswerForm) -> Grammar:
        """The grammar, compiled on a thread unless it is known. Raises Invalid, Overloaded.

        A compilation is always a large job, for 20 bytes may take 70 ms.
        """
        if (grammar := self.grammars.get(tenant_id, form.digest)) is None:
            size_bytes = LARGE_BYTES + _GRAMMAR_COST * form.size_bytes
            grammar = await self.encoders.run(tenant_id, size_bytes, form.compiled)
            self.grammars.keep(tenant_id, form.digest, grammar)
        return grammar

    async def _check_payable(self, ticket: Ticket) -> None:
        """Raise what the charges and the hold would raise now, and charge nothing."""
        tokens = tokens_of(ticket, self.learned_tokens.expect)
        await self.limiter.check(ticket.uncharged, tokens=tokens)
        if ticket.identity.has_hard_budget:
            await self._write_hold(ticket, None)

    @spans.traced("limits")
    async def _charge_rest(self, ticket: Ticket) -> None:
        """Charge the limits that have not been charged yet. Raises RateLimited; then none is."""
        tokens = tokens_of(ticket, self.learned_tokens.expect)
        await self._charge(ticket, ticket.uncharged, tokens)

    async def _charge(self, ticket: Ticket, limits: Sequence[Limit], tokens: int) -> None:
        lifetime_ms = int((ticket.timeouts.request_s + SEAT_SLACK_S) * 1000)
        grant = await self.limiter.acquire(
            ticket.request_id, limits, tokens=tokens, lifetime_ms=lifetime_ms
        )
        ticket.grant = ticket.grant.joined(grant) if ticket.grant.limits else grant

    @spans.traced("hold")
    async def _write_hold(self, ticket: Ticket, engine_id: str | None) -> int:
        """Write the durable hold before the engine hears of the request; its lease in tokens.

        engine_id: None to look whether the budget covers it, and to write nothing. Raises
        QuotaExceeded, Limited, Unavailable.
        """
        hold, num_answers = hold_of(ticket, engine_id or ""), ticket.message.num_answers

        def write(conn: Connection) -> int | QuotaExceeded | Limited:
            covered = hold
            if ticket.identity.has_hard_budget:
                try:
                    covered = _covered(conn, hold, ticket.price, num_answers)
                # Returned: raised, it would make its whole group run again, and undo the note.
                except BudgetExhausted as refused:
                    note_refusal(conn, hold.tenant_id, refused)
                    return refused
                except BudgetHeld as refused:
                    return refused
            if engine_id is not None:
                open_hold(conn, covered)
            return covered.token_lease

        try:
            lease = await self.database.write(write, order=hold.tenant_id)
        except LedgerUnavailable:
            raise errors.metering_unavailable() from None
        if not isinstance(lease, int):
            raise lease
        return lease


def _tell(ticket: Ticket) -> None:
    """Tell the log and the trace which model it is, now that its name is known to be one."""
    base, adapter = ticket.base.model_id, ticket.adapter
    logs.note(model=base, adapter=adapter.adapter_id if adapter else None)
    spans.note(request_model=ticket.request.model, base_model=base, receipt_id=ticket.request_id)
    if adapter:
        spans.note(
            adapter_id=adapter.adapter_id,
            adapter_version=adapter.version,
            adapter_digest=adapter.digest,
        )


@spans.traced("wake")
async def _wake(ticket: Ticket) -> None:
    """Wait for a base model that sleeps. Raises Unavailable and Overloaded, with a Retry-After."""
    await ticket.base.keeper.wake(ticket.tenant_id)
    _check_ready(ticket.base)


def _check_ready(base: ServedBase) -> None:
    if not base.engines.is_ready:
        raise errors.engine_unavailable()


def _covered(conn: Connection, hold: Hold, price: Price, num_answers: int) -> Hold:
    """The hold, cut to what a hard budget has left. Raises BudgetExhausted, BudgetHeld."""
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


def _refusing(refused: QuotaExceeded | Limited | Overloaded) -> RefusingLimit:
    """The kind of the limit that refused a request."""
    if isinstance(refused, Overloaded):
        return "queue"
    is_share = isinstance(refused, Limited) and refused.scope != "budget"
    return "queue_share" if is_share else "budget"


async def count_request(limiter: MemoryLimiter, identity: Identity) -> Grant:
    """Charge the limits for a request that takes no tokens. Raises RateLimited."""
    limits = [limit for limit in identity.limits if limit.metric == "requests"]
    grant = await limiter.acquire(uuid.uuid4().hex, limits, tokens=0, lifetime_ms=1)
    limiter.release(grant, 0)
    return grant
