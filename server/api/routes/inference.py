"""Chat completions, completions, and cancelling one."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from engine.messages import RequestOutput
from server.accounts.auth import Identity
from server.api import errors
from server.api.bodies import BodyDep
from server.api.deps import GatewayDep, InferenceKey
from server.api.limit_headers import limit_headers
from server.api.openai import ChatRequest, CompletionRequest, parse_request
from server.api.recordings import Recording
from server.api.timed_stream import READING_S, TimedStream
from server.gateway import Gateway
from server.inference import admission, cancels, generation
from server.inference.admission import Admitted
from server.inference.idempotency import MAX_KEY_CHARACTERS, Claim, StoredAnswer
from server.limits.rules import Grant

router = APIRouter()
T = TypeVar("T")

_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_JSON_HEADERS = {"content-type": "application/json"}
_CLIENT_CLOSED = 499

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=MAX_KEY_CHARACTERS, pattern=r"^[ -~]+$"
    ),
]
"""Printable ASCII."""


@router.post("/chat/completions")
async def chat_completions(
    request: Request,
    gateway: GatewayDep,
    identity: InferenceKey,
    body: BodyDep,
    key: IdempotencyKey = None,
) -> Response:
    asked = parse_request(body, ChatRequest)
    claim = Claim.of(identity.tenant_id, "chat/completions", key, body) if key else None
    return await _complete(request, gateway, identity, asked, claim)


@router.post("/completions")
async def completions(
    request: Request,
    gateway: GatewayDep,
    identity: InferenceKey,
    body: BodyDep,
    key: IdempotencyKey = None,
) -> Response:
    asked = parse_request(body, CompletionRequest)
    claim = Claim.of(identity.tenant_id, "completions", key, body) if key else None
    return await _complete(request, gateway, identity, asked, claim)


@router.post("/chat/completions/{answer_id}/cancel")
async def cancel(answer_id: str, gateway: GatewayDep, identity: InferenceKey) -> dict[str, object]:
    """Stop an answer under way: its stream ends as usual, with usage, and what ran is paid."""
    if not await cancels.cancel(gateway, identity.tenant_id, answer_id.rpartition("-")[2]):
        raise errors.not_found("There is no such completion under way.", param="id")
    return {"id": answer_id, "object": "chat.completion.cancelled", "cancelled": True}


async def _complete(
    request: Request,
    gateway: Gateway,
    identity: Identity,
    asked: ChatRequest | CompletionRequest,
    claim: Claim | None,
) -> Response:
    """Admit, then answer whole or as a stream; a client that hangs up aborts its request.

    With an Idempotency-Key the request goes on without its client, and the repeat is answered.
    """
    if claim is not None:
        if stored := await gateway.idempotency.claim(claim):
            return await _replay(gateway, identity, stored)
        make = functools.partial(_record, gateway, identity, asked)
        return await _read(request, gateway, identity, gateway.recorder.start(claim, make))
    admitted = await admission.admit(gateway, identity, asked)
    headers = _limit_headers(gateway, admitted.grant)
    if asked.stream:
        return await _stream(request, gateway, admitted, headers)
    answered = await _unless_gone(request, generation.whole(gateway, admitted))
    if answered is None:
        return Response(status_code=_CLIENT_CLOSED)
    body, digest = answered
    return Response(
        msgspec.json.encode(body), headers=headers | _JSON_HEADERS | _digest_header(digest)
    )


async def _stream(
    request: Request,
    gateway: Gateway,
    admitted: Admitted,
    headers: dict[str, str],
) -> Response:
    """The first output is awaited before the status is sent: until then failures have their own."""
    outputs = generation.outputs(gateway, admitted)
    first = await _unless_gone(request, _first(outputs))
    if first is None:
        return Response(status_code=_CLIENT_CLOSED)
    return TimedStream(
        generation.events(gateway, admitted, first, outputs),
        headers=headers | _SSE_HEADERS | _digest_header(first.adapter_digest),
        timeout_s=_patience_s(gateway),
        on_end=outputs.aclose,
    )


# ---- with an Idempotency-Key ----


async def _record(
    gateway: Gateway,
    identity: Identity,
    asked: ChatRequest | CompletionRequest,
    recording: Recording,
) -> None:
    """The request from its admission to its end, with or without a client."""
    admitted = await admission.admit(gateway, identity, asked)
    recording.hold(admitted.message.request_id, _limit_headers(gateway, admitted.grant))
    if not asked.stream:
        body, digest = await generation.whole(gateway, admitted)
        headers = _JSON_HEADERS | _digest_header(digest)
        await recording.answer(200, headers, msgspec.json.encode(body))
        return
    outputs = generation.outputs(gateway, admitted)
    first = await _first(outputs)
    recording.begin(200, _SSE_HEADERS | _digest_header(first.adapter_digest))
    async with aclosing(generation.events(gateway, admitted, first, outputs)) as events:
        async for event in events:
            await recording.put(event)


async def _read(
    request: Request, gateway: Gateway, identity: Identity, recording: Recording
) -> Response:
    """The answer while it is made; a client that hangs up leaves it to be asked for again."""
    head = await _unless_gone(request, recording.head())
    if head is None:
        await recording.leave()
        return Response(status_code=_CLIENT_CLOSED)
    status, headers = head
    return TimedStream(
        recording.body(),
        status=status,
        headers=recording.live_headers | headers,
        timeout_s=_patience_s(gateway),
        on_end=recording.leave,
    )


async def _replay(gateway: Gateway, identity: Identity, stored: StoredAnswer) -> Response:
    """Byte for byte what was answered then. It counts as a request, and takes no tokens."""
    grant = await admission.count_request(gateway, identity)
    headers = stored.headers | _limit_headers(gateway, grant) | {"idempotent-replayed": "true"}
    return TimedStream(stored.chunks(), status=stored.status, headers=headers, timeout_s=READING_S)


# ---- until the client leaves ----


async def _first(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    try:
        return await anext(outputs)
    except BaseException:
        await outputs.aclose()
        raise


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None when the client hung up, and the work is cancelled."""
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


def _patience_s(gateway: Gateway) -> float:
    return gateway.settings.request_timeout_s + READING_S


def _limit_headers(gateway: Gateway, grant: Grant) -> dict[str, str]:
    return limit_headers(grant.standings, is_degraded=gateway.limiter.is_degraded)


def _digest_header(digest: str | None) -> dict[str, str]:
    """What the step applied, not what was asked for; empty for the base model."""
    return {"x-chorale-adapter-digest": digest or ""}
