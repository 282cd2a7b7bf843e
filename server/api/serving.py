"""A request for completions, from its parsed body to the response.

A client that hangs up aborts its request. With an Idempotency-Key the request runs on without its
client, and a repeat gets its answer.
"""

import asyncio
import functools
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from engine.messages import RequestOutput
from server.accounts.auth import Identity
from server.api.answers import LastEvent
from server.api.limit_headers import limit_headers
from server.api.padding import ASKED_BYTES, Padding
from server.api.recordings import Recorder, Recording
from server.api.rendering import Asked, Rendering
from server.api.timed_stream import READING_S, Ended, TimedStream
from server.billing.failures import Failures
from server.inference.admission import Admission, Admitted, count_request
from server.inference.generation import Generation
from server.inference.idempotency import Claim, IdempotencyKeys, StoredAnswer
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


@dataclass(frozen=True, slots=True)
class Serving:
    """Serves requests for completions.

    request_timeout_s: the longest time that one may take.   pad_events_to: every event of a stream
    has a multiple of so many bytes; 0 where only clients that ask for it get padded events.
    """

    admission: Admission
    generation: Generation
    idempotency: IdempotencyKeys
    recorder: Recorder
    failures: Failures
    request_timeout_s: float
    pad_events_to: int

    async def answer(
        self, request: Request, identity: Identity, asked: Asked, claim: Claim | None
    ) -> Response:
        """Admit the request and answer it whole or as a stream. claim: on its Idempotency-Key."""
        if claim is not None:
            self.recorder.check(claim)
            if stored := await self.idempotency.claim(claim):
                return await self._replay(identity, stored)
            make = functools.partial(self._record, identity, asked)
            return await self._read(request, self.recorder.start(claim, make))
        request_id = uuid.uuid4().hex
        admitted = await self.admission.admit(identity, asked.for_model(), request_id)
        self.failures.expect(request_id)
        try:
            response = await self._respond(request, asked, admitted)
        except BaseException:
            self.failures.note_answered(request_id)
            raise
        return Ended(response, lambda: self.failures.note_answered(request_id))

    async def _respond(self, request: Request, asked: Asked, admitted: Admitted) -> Response:
        rendering, headers = self._rendering(asked, admitted), self._limit_headers(admitted.grant)
        if asked.stream:
            return await self._stream(request, rendering, headers)
        answered = await _unless_gone(request, rendering.whole())
        if answered is None:
            return Response(status_code=_CLIENT_CLOSED)
        body, digest = answered
        return Response(
            msgspec.json.encode(body), headers=headers | _JSON_HEADERS | _digest_header(digest)
        )

    async def _stream(
        self, request: Request, rendering: Rendering, headers: dict[str, str]
    ) -> Response:
        """Stream the answer once it has an output; a fault before that keeps its own status."""
        outputs = self.generation.outputs(rendering.admitted)
        first = await _unless_gone(request, _first(outputs))
        if first is None:
            return Response(status_code=_CLIENT_CLOSED)
        return TimedStream(
            rendering.events(first, outputs),
            headers=headers | _SSE_HEADERS | _digest_header(first.adapter_digest),
            timeout_s=self.request_timeout_s + READING_S,
            on_end=outputs.aclose,
        )

    # ---- with an Idempotency-Key ----

    async def _record(self, identity: Identity, asked: Asked, recording: Recording) -> None:
        """Run the request from its admission to its end, with or without a client."""
        request_id = recording.claim.request_id
        admitted = await self.admission.admit(identity, asked.for_model(), request_id)
        self.failures.expect(request_id)
        recording.hold(self._limit_headers(admitted.grant))
        rendering = self._rendering(asked, admitted)
        if not asked.stream:
            body, digest = await rendering.whole()
            headers = _JSON_HEADERS | _digest_header(digest)
            await recording.answer(200, headers, msgspec.json.encode(body))
            return
        outputs = self.generation.outputs(admitted)
        first = await _first(outputs)
        recording.begin(200, _SSE_HEADERS | _digest_header(first.adapter_digest))
        async with aclosing(rendering.events(first, outputs)) as events:
            async for event in events:
                if isinstance(event, LastEvent):
                    await recording.finish(event)
                else:
                    await recording.put(event)

    async def _read(self, request: Request, recording: Recording) -> Response:
        """Send the answer while it is made; a client that hangs up may ask for it again."""
        head = await _unless_gone(request, recording.head())
        if head is None:
            await recording.leave()
            return Response(status_code=_CLIENT_CLOSED)
        status, headers = head
        return TimedStream(
            recording.body(),
            status=status,
            headers=recording.live_headers | headers,
            timeout_s=self.request_timeout_s + READING_S,
            on_end=recording.leave,
        )

    async def _replay(self, identity: Identity, stored: StoredAnswer) -> Response:
        """Send the stored answer, byte for byte. It counts as a request, and takes no tokens."""
        grant = await count_request(self.admission.limiter, identity)
        headers = stored.headers | self._limit_headers(grant) | {"idempotent-replayed": "true"}
        return TimedStream(
            stored.chunks(), status=stored.status, headers=headers, timeout_s=READING_S
        )

    def _rendering(self, asked: Asked, admitted: Admitted) -> Rendering:
        asked_bytes = ASKED_BYTES if asked.obfuscates else 0
        padding = Padding(self.pad_events_to or asked_bytes)
        return Rendering(self.generation, asked, admitted, padding)

    def _limit_headers(self, grant: Grant) -> dict[str, str]:
        return limit_headers(grant.standings, is_degraded=self.admission.limiter.is_degraded)


# ---- until the client leaves ----


async def _first(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    try:
        return await anext(outputs)
    except BaseException:
        await outputs.aclose()
        raise


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; if the client hangs up, the work is cancelled and this is None."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _digest_header(digest: str | None) -> dict[str, str]:
    """The digest of the adapter that the step applied; empty for the base model."""
    return {"x-chorale-adapter-digest": digest or ""}
