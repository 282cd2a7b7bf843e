"""A request on its way to an answer: one attempt at the model that it names, or attempts at the
models of a route, one after another, until one is the answer.

Each attempt is admitted, held and generated as any request is. `server.inference.attempts` decides
what comes after it. Nothing leaves for the client before it is decided which attempt answers.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine.wire.delivery import Take
from engine.wire.messages import RequestOutput
from registry.errors import Fault, StorageError
from server import logs
from server.accounts.auth import Identity
from server.api.rendering import Asked
from server.database.database import DatabaseError
from server.inference.admission import Admission
from server.inference.attempts import Outcome, attempt_id, least_mean_logprob, outcome_of
from server.inference.generation import Generation
from server.inference.generation_request import GenerationRequest
from server.inference.output_stream import OutputStream
from server.inference.route import Route, RouteModel
from server.inference.ticket import Ticket, Timeouts
from server.pool.running import Parent
from server.traces import spans

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, T]], Awaitable[T | None]]
"""A way to wait for work until the client leaves; then the result is None."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer under way.   asked: with the name of the model that answers."""

    asked: Asked
    ticket: Ticket
    outputs: OutputStream


@dataclass(slots=True, kw_only=True)
class Routed:
    """One request and its attempts.

    route: None where the request names a model.   clock: returns seconds.
    request_ids: of the attempts that were admitted.   ticket: the last attempt's; None if it was
    refused.
    """

    route: Route | None
    identity: Identity
    asked: Asked
    request_id: str
    admission: Admission
    generation: Generation
    clock: Callable[[], float]
    request_ids: list[str] = field(default_factory=list)
    ticket: Ticket | None = None
    _tried: list[tuple[str, Outcome]] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that name the route, and say how each attempt ended; none without a route."""
        if self.route is None:
            return {}
        attempts = ", ".join(f"{model};{outcome}" for model, outcome in self._tried)
        return {"x-chorale-route": self.route.name, "x-chorale-attempts": attempts}

    async def begin(self, wait: Wait[Any]) -> Begun | None:
        """Begin an answer of the model, or try the route's until one answers; None if the client
        left meanwhile.

        Raises the error of the last attempt if none gave an answer: Fault, StorageError,
        DatabaseError.
        """
        request = self.asked.for_model()
        if self.route is None:
            ticket = await self._admit(request, self.request_id, self.admission.timeouts)
            return Begun(self.asked, ticket, self.generation.begin(ticket))
        spans.note(request_model=self.route.name)
        parents = self.admission.bases.parents
        parent = parents[self.request_id] = Parent(self.identity.tenant_id)
        try:
            return await self._try(self.route, request, wait, parent)
        finally:
            logs.note(attempts=len(self._tried))
            del parents[self.request_id]

    async def end(self) -> None:
        """Note that the answer is complete, or that its client left."""
        for request_id in self.request_ids:
            self.generation.failures.note_answered(request_id)

    async def _try(
        self, route: Route, request: GenerationRequest, wait: Wait[Any], parent: Parent
    ) -> Begun | None:
        """Try the models in their order. A weak answer is better than an error: the last one is
        taken where no later model answered.
        """
        ends_at = self.clock() + self.admission.timeouts.request_s
        given: Begun | None = None
        failure: Exception | None = None
        for model in route.models_for(request.request_key or self.request_id):
            self.ticket = None
            try:
                begun = await self._attempt(request, model, ends_at - self.clock(), wait)
            except (Fault, StorageError, DatabaseError) as error:
                failure, outcome = error, outcome_of(error)
            else:
                if begun is None:
                    return None
                given, outcome = begun
            self._tried.append((model.model, outcome))
            if outcome.is_end or parent.is_cancelled or self.clock() >= ends_at:
                break
        if given is None:
            assert failure
            raise failure
        return given

    @spans.traced("attempt", takes_notes=True)
    async def _attempt(
        self, request: GenerationRequest, model: RouteModel, left_s: float, wait: Wait[Any]
    ) -> tuple[Begun, Outcome] | None:
        """Begin an answer of this model, or make all of it if it has to be judged."""
        given, least = self.admission.timeouts, model.min_mean_logprob
        first_token_s = min(given.first_token_s, model.first_token_timeout_s or left_s, left_s)
        ticket = await self._admit(
            _asking(request, model),
            attempt_id(self.request_id, len(self._tried)),
            Timeouts(first_token_s, left_s, given.hold_lifetime_s),
        )
        asked = self.asked.model_copy(update={"model": model.model})
        outputs = self.generation.begin(ticket)
        if least is None:
            first = await wait(outputs.first())
            return first and (Begun(asked, ticket, outputs), Outcome.ANSWERED)
        made = await wait(_all_of(outputs))
        if made is None:
            return None
        is_weak = least_mean_logprob(made) < least
        if request.sampling.logprobs is None:
            made = [output._replace(logprobs=None) for output in made]
        begun = Begun(asked, ticket, OutputStream(lambda take: _again(made, take)))
        return begun, Outcome.WEAK if is_weak else Outcome.ANSWERED

    async def _admit(
        self, request: GenerationRequest, request_id: str, timeouts: Timeouts
    ) -> Ticket:
        """Admit an attempt within its time."""
        self.ticket = await self.admission.admit(self.identity, request, request_id, timeouts)
        self.generation.failures.expect(request_id)
        self.request_ids.append(request_id)
        return self.ticket


async def _all_of(outputs: OutputStream) -> list[RequestOutput]:
    made: list[RequestOutput] = []
    async with aclosing(outputs):
        outputs.follow(made.append)
        await outputs.end()
    return made


async def _again(made: Sequence[RequestOutput], take: Take) -> None:
    for output in made:
        take(output)


def _asking(request: GenerationRequest, model: RouteModel) -> GenerationRequest:
    """The request for this model, with logprobs if they have to be judged."""
    sampling = request.sampling
    if model.min_mean_logprob is not None and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    return replace(request, model=model.model, sampling=sampling)
