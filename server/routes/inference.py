"""Chat completions, completions, and cancelling one."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from engine.messages import RequestOutput
from server import errors, generation
from server.auth import Identity
from server.deps import BodyDep, GatewayDep, InferenceKey
from server.gateway import Gateway
from server.limits import RateLimits
from server.openai import ChatRequest, CompletionRequest, parse_request

router = APIRouter()
T = TypeVar("T")

_SSE_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_CLIENT_CLOSED = 499


@router.post("/chat/completions")
async def chat_completions(
    request: Request, body: BodyDep, gateway: GatewayDep, identity: InferenceKey
) -> Response:
    return await _complete(request, gateway, identity, parse_request(body, ChatRequest))


@router.post("/completions")
async def completions(
    request: Request, body: BodyDep, gateway: GatewayDep, identity: InferenceKey
) -> Response:
    return await _complete(request, gateway, identity, parse_request(body, CompletionRequest))


@router.post("/chat/completions/{answer_id}/cancel")
async def cancel(answer_id: str, gateway: GatewayDep, identity: InferenceKey) -> dict[str, object]:
    """Stop an answer under way: its stream ends as usual, with usage, and what ran is paid."""
    request_id = answer_id.rpartition("-")[2]
    if gateway.running.get(request_id) != identity.tenant_id:
        raise errors.not_found("There is no such completion under way.", param="id")
    await gateway.engines.abort(request_id)
    return {"id": answer_id, "object": "chat.completion.cancelled", "cancelled": True}


async def _complete(
    request: Request,
    gateway: Gateway,
    identity: Identity,
    asked: ChatRequest | CompletionRequest,
) -> Response:
    """Admit, then answer whole or as a stream; a client that hangs up aborts its request."""
    request.state.rate_headers = _rate_headers(gateway, identity)
    admitted = await generation.admit(gateway, identity, asked)
    headers = _rate_headers(gateway, identity)
    if asked.stream:
        return await _stream(request, gateway, admitted, headers)
    answered = await _unless_gone(request, generation.whole(gateway, admitted))
    if answered is None:
        return Response(status_code=_CLIENT_CLOSED)
    body, digest = answered
    return Response(
        msgspec.json.encode(body),
        media_type="application/json",
        headers=headers | _digest_header(digest),
    )


async def _stream(
    request: Request,
    gateway: Gateway,
    admitted: generation.Generation,
    headers: dict[str, str],
) -> Response:
    """The first output is awaited before the status is sent: until then failures have their own."""
    outputs = generation.outputs(gateway, admitted)
    first = await _unless_gone(request, _first(outputs))
    if first is None:
        return Response(status_code=_CLIENT_CLOSED)
    return StreamingResponse(
        generation.events(gateway, admitted, first, outputs),
        media_type="text/event-stream",
        headers=headers | _SSE_HEADERS | _digest_header(first.adapter_digest),
    )


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


def _rate_headers(gateway: Gateway, identity: Identity) -> dict[str, str]:
    limits = RateLimits(
        requests_per_minute=identity.requests_per_minute,
        tokens_per_minute=identity.tokens_per_minute,
    )
    return gateway.limiter.headers(identity.tenant_id, limits, time.monotonic())


def _digest_header(digest: str | None) -> dict[str, str]:
    """What the step applied, not what was asked for; empty for the base model."""
    return {"x-chorale-adapter-digest": digest or ""}
