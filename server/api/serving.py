"""A request for completions, from its parsed body to the response.

A client that hangs up aborts its request. With an Idempotency-Key the request runs on without its
client, and a repeat gets its answer.
"""

import functools
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from engine.wire.pulled import pulled
from server.accounts.auth import Identity
from server.api.answers import LastEvent
from server.api.errors import KNOWN, ErrorAnswer, answer_of
from server.api.leaving_clients import unless_gone
from server.api.limit_headers import limit_headers
from server.api.padding import ASKED_BYTES, Padding
from server.api.recordings import Recorder, Recording
from server.api.rendering import Asked, Rendering
from server.api.routed import Begun, Routed
from server.api.timed_stream import READING_S, Ended, LiveStream
from server.inference.admission import Admission, count_request
from server.inference.generation import Generation
from server.inference.idempotency import Claim, StoredAnswer
from server.inference.routes import Routes
from server.limits.rules import Grant

T = TypeVar("T")

_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    # A proxy that compressed the stream would hold events back, and undo their padding.
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
_JSON_HEADERS = {"content-type": "application/json"}
_CLIENT_CLOSED = 499
_MOST_HEADER_CHARACTERS = 1_000
"""Longest list of paths in a header: proxies refuse headers of some thousand bytes."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Serves requests for completions.

    pad_events_to: every event of a stream has a multiple of so many bytes; 0 where only clients
    that ask for it get padded events.
    clock: returns the seconds by which requests for routes count their time.
    """

    admission: Admission
    generation: Generation
    recorder: Recorder
    pad_events_to: int
    routes: Routes
    clock: Callable[[], float] = time.monotonic

    async def answer(
        self, request: Request, identity: Identity, asked: Asked, claim: Claim | None
    ) -> Response:
        """Admit the request and answer it whole or as a stream. claim: on its Idempotency-Key."""
        if claim is not None:
            if stored := await self.recorder.claim(claim):
                return await self._replay(identity, stored)
            make = functools.partial(self._record, identity, asked)
            return await self._read(request, self.recorder.start(claim, make))
        routed = await self._routed(identity, asked, request.state.request_id)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(routed.end)
            # An error tells of the attempts as well.
            with _errors_with(lambda: routed.headers):
                begun = await routed.begin(functools.partial(unless_gone, request.receive))
                response = Response(status_code=_CLIENT_CLOSED)
                if begun is not None:
                    response = await self._respond(request, begun, routed.headers)
            return Ended(response, undo.pop_all().aclose)

    async def _respond(self, request: Request, begun: Begun, headers: dict[str, str]) -> Response:
        rendering, outputs = self._rendering(begun), begun.outputs
        headers = headers | self._limit_headers(begun.ticket.grant)
        if not begun.asked.stream:
            answered = await unless_gone(request.receive, rendering.whole(outputs))
            if answered is None:
                return Response(status_code=_CLIENT_CLOSED)
            body, digest = answered
            headers |= _JSON_HEADERS | _own_headers(rendering, digest)
            return Response(msgspec.json.encode(body), headers=headers)
        # A fault before the first output keeps its own status.
        first = await unless_gone(request.receive, outputs.first())
        if first is None:
            return Response(status_code=_CLIENT_CLOSED)
        headers |= _SSE_HEADERS | _own_headers(rendering, first.adapter_digest)
        stream = LiveStream(functools.partial(rendering.stream, outputs), headers)
        return Ended(stream, outputs.aclose, self.admission.timeouts.request_s + READING_S)

    async def _routed(self, identity: Identity, asked: Asked, request_id: str) -> Routed:
        """The request, on its way to what its model's name means; a base model's is no route's."""
        route = None
        if not self.admission.bases.named(asked.model):
            route = await self.routes.find(identity.tenant_id, asked.model)
        return Routed(
            route=route,
            identity=identity,
            asked=asked,
            request_id=request_id,
            admission=self.admission,
            generation=self.generation,
            clock=self.clock,
        )

    # ---- with an Idempotency-Key ----

    async def _record(self, identity: Identity, asked: Asked, recording: Recording) -> None:
        """Run the request from its admission to its end, with or without a client.

        Only the attempt that ends it counts as its payment: where that one was refused, a repeat
        runs again.
        """
        routed = await self._routed(identity, asked, recording.claim.request_id)
        recording.request_ids = routed.request_ids
        try:
            begun = await routed.begin(_wait)
        finally:
            recording.headers = routed.headers
            if routed.ticket:
                recording.hold(self._limit_headers(routed.ticket.grant))
        assert begun
        recording.request_id = begun.ticket.request_id
        recording.hold(self._limit_headers(begun.ticket.grant))
        rendering = self._rendering(begun)
        if not asked.stream:
            body, digest = await rendering.whole(begun.outputs)
            headers = _JSON_HEADERS | _own_headers(rendering, digest)
            await recording.answer(200, headers, msgspec.json.encode(body))
            return
        first = await begun.outputs.first()
        recording.begin(200, _SSE_HEADERS | _own_headers(rendering, first.adapter_digest))
        async with aclosing(pulled(functools.partial(rendering.stream, begun.outputs))) as events:
            async for event in events:
                if isinstance(event, LastEvent):
                    await recording.finish(event)
                else:
                    await recording.put(event)

    async def _read(self, request: Request, recording: Recording) -> Response:
        """Send the answer while it is made; a client that hangs up may ask for it again."""
        with _errors_with(lambda: recording.headers):
            head = await unless_gone(request.receive, recording.head())
        if head is None:
            await recording.leave()
            return Response(status_code=_CLIENT_CLOSED)
        status, headers = head
        stream = StreamingResponse(recording.body(), status, recording.live_headers | headers)
        return Ended(stream, recording.leave, self.admission.timeouts.request_s + READING_S)

    async def _replay(self, identity: Identity, stored: StoredAnswer) -> Response:
        """Send the stored answer, byte for byte. It counts as a request, and takes no tokens."""
        grant = await count_request(self.admission.limiter, identity)
        headers = stored.headers | self._limit_headers(grant) | {"idempotent-replayed": "true"}
        body = stored.chunks()
        return Ended(StreamingResponse(body, stored.status, headers), body.aclose, READING_S)

    def _rendering(self, begun: Begun) -> Rendering:
        asked_bytes = ASKED_BYTES if begun.asked.options.include_obfuscation else 0
        padding = Padding(self.pad_events_to or asked_bytes)
        return Rendering(self.generation, begun.asked, begun.ticket, padding)

    def _limit_headers(self, grant: Grant) -> dict[str, str]:
        return limit_headers(grant.standings, is_degraded=self.admission.limiter.is_degraded)


# ---- until the client leaves ----


@contextmanager
def _errors_with(headers: Callable[[], dict[str, str]]) -> Iterator[None]:
    """Add headers to an error that leaves for the client, if there are any."""
    try:
        yield
    except KNOWN as error:
        answer = answer_of(error)
        raise ErrorAnswer(answer.status, answer.error, answer.headers | headers()) from error


async def _wait(work: Coroutine[Any, Any, T]) -> T:
    return await work


def _own_headers(rendering: Rendering, digest: str | None) -> dict[str, str]:
    """The digest of the adapter that the step applied, empty for the base model; and the paths of
    what the request demands and nothing enforces, as far as a header may have them.
    """
    headers = {"x-chorale-adapter-digest": digest or ""}
    if not_enforced := ", ".join(rendering.ticket.not_enforced):
        headers["x-chorale-not-enforced"] = not_enforced[:_MOST_HEADER_CHARACTERS]
    return headers
