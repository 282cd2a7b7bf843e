"""The ticket of a request: each step of the admission adds what it found, and the steps after it,
up to the last token, read it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.wire.messages import AddRequest
from registry.ref import AdapterRef
from server.accounts.auth import Identity
from server.adapters.names import NamedAdapter
from server.billing.holds import Hold
from server.billing.prices import Price
from server.billing.rating import amount_nanousd
from server.database.clock import now_ms
from server.inference.generation_request import Chat, GenerationRequest
from server.inference.prompts import Prompts, max_tokens
from server.inference.sampling import sampling_of
from server.inference.served_base import ServedBase
from server.inference.texts import Text
from server.limits.rules import Grant, Limit
from server.pool.engines import Engine
from server.pool.running import RunningRequest
from server.tools.dialect import Dialect
from server.tools.grammar import AnswerForm
from server.tools.response_template import PLAIN
from server.traces import spans


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds until a request's first token, until its end, and until its hold expires."""

    first_token_s: float
    request_s: float
    hold_lifetime_s: float


@dataclass(slots=True, eq=False)
class Ticket:
    """One request and what was found and taken for it. A field without a value is not known yet.

    arrived_at: seconds of `time.monotonic`.
    named: the adapter that the model's name stands for; None for a base model.
    limits: all that apply.   grant: what has been charged of them; a request that is admitted has
    all of it.   is_at_work: whether long prompts are tokenized for it now, or a constraint is
    compiled. not_enforced: paths of the request's demands that nothing enforces. running: its place
    among the requests under way, at the engine that is to take it.
    """

    identity: Identity
    request: GenerationRequest
    request_id: str
    timeouts: Timeouts
    arrived_at: float = field(default_factory=time.monotonic)
    # The model's name is resolved.
    base: ServedBase = field(init=False)
    named: NamedAdapter | None = None
    price: Price = field(init=False)
    limits: tuple[Limit, ...] = ()
    # The prompts are encoded.
    text: Text = field(init=False)
    form: AnswerForm = field(init=False)
    message: AddRequest = field(init=False)
    is_at_work: bool = False
    not_enforced: tuple[str, ...] = ()
    # An engine is chosen, and what the request may take is charged.
    running: RunningRequest = field(init=False)
    grant: Grant = field(init=False)

    def __post_init__(self) -> None:
        self.grant = Grant(request_id=self.request_id, limits=(), standings=())

    @property
    def tenant_id(self) -> str:
        return self.identity.tenant_id

    @property
    def adapter(self) -> AdapterRef | None:
        return self.named.ref if self.named else None

    @property
    def uncharged(self) -> list[Limit]:
        """The limits that have not been charged yet."""
        return [limit for limit in self.limits if limit not in self.grant.limits]


def form_of(request: GenerationRequest, dialect: Dialect, *, is_reasoning: bool) -> AnswerForm:
    """The form that the request's answers must have."""
    if not isinstance(request.prompts, Chat):
        return AnswerForm(PLAIN, None, request.constraint, {})
    return AnswerForm(
        dialect.template, request.tool_use, request.constraint, dialect.token_ids, is_reasoning
    )


def message_of(ticket: Ticket, encoded: Prompts) -> AddRequest:
    """The message to the engine, without the grammar of its answers. Raises Invalid."""
    identity, request = ticket.identity, ticket.request
    first, *others = encoded.token_ids
    longest = max(map(len, (first, *others)))
    most = max_tokens(request, longest, ticket.base.longest)
    return AddRequest(
        request_id=ticket.request_id,
        tenant_id=identity.tenant_id,
        prompt_token_ids=tuple(first),
        more_prompts=tuple(map(tuple, others)),
        sampling_params=sampling_of(request, ticket.text, encoded, most),
        token_lease=request.num_answers * most,
        deadline_s=ticket.timeouts.request_s,
        first_token_timeout_s=ticket.timeouts.first_token_s,
        adapter=ticket.adapter,
        cache_salt=identity.cache_salt,
        weight=identity.weight,
        priority=request.priority,
        predicted_token_ids=tuple(encoded.predicted_token_ids[:most]),
        drafts=request.drafts,
        shares_drafts=request.shares_drafts,
    )


def tokens_of(ticket: Ticket, expect: Callable[[str], int]) -> int:
    """Tokens to reserve: those of the prompts, and of the answers as many as were asked for, or as
    `expect` learned from the tenant's answers.
    """
    message = ticket.message
    completion = message.token_lease
    if ticket.request.max_tokens is None:
        completion = min(completion, message.num_answers * expect(message.tenant_id))
    return message.num_prompt_tokens + completion


def hold_of(ticket: Ticket, engine_id: str) -> Hold:
    """The hold for the most that the request may cost."""
    now, message, adapter, price = now_ms(), ticket.message, ticket.adapter, ticket.price
    num_prompt_tokens, lease = message.num_prompt_tokens, message.token_lease
    return Hold(
        request_id=ticket.request_id,
        tenant_id=ticket.tenant_id,
        key_id=ticket.identity.key_id,
        model=ticket.request.model,
        base_model=ticket.base.model_id,
        price_version=price.price_version,
        amount_nanousd=amount_nanousd(num_prompt_tokens, 0, lease, price),
        num_prompt_tokens=num_prompt_tokens,
        token_lease=lease,
        engine_id=engine_id,
        created_at_ms=now,
        expires_at_ms=now + int(ticket.timeouts.hold_lifetime_s * 1000),
        adapter_id=adapter.adapter_id if adapter else None,
        adapter_version=adapter.version if adapter else None,
        adapter_digest=adapter.digest if adapter else None,
        traceparent=spans.traceparent(),
    )


def running_of(ticket: Ticket, engine: Engine) -> RunningRequest:
    """The request's place among those under way at an engine."""
    message, adapter = ticket.message, ticket.adapter
    where = engine.residency.get(adapter.object_key) if adapter else None
    return RunningRequest(
        request_id=ticket.request_id,
        tenant_id=message.tenant_id,
        num_answers=message.num_answers,
        wanted_tokens=message.token_lease,
        is_cold=adapter is not None and (where is None or where.tier != "device"),
        engine=engine.name,
        adapter=ticket.request.model if adapter else None,
    )
