"""Chat completions, completions, and their cancellation."""

from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from server.api import errors
from server.api.bodies import BodyDep
from server.api.deps import CancelsDep, InferenceKey, ServingDep
from server.api.openai import ChatRequest, CompletionRequest, parse_request
from server.inference.idempotency import MAX_KEY_CHARACTERS, Claim

router = APIRouter()

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=MAX_KEY_CHARACTERS, pattern=r"^[ -~]+$"
    ),
]
"""A header of printable ASCII."""


@router.post("/chat/completions")
async def chat_completions(
    request: Request,
    serving: ServingDep,
    identity: InferenceKey,
    body: BodyDep,
    key: IdempotencyKey = None,
) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    asked = parse_request(body, ChatRequest)
    claim = Claim.of(identity.tenant_id, "chat/completions", key, body) if key else None
    return await serving.answer(request, identity, asked, claim)


@router.post("/completions")
async def completions(
    request: Request,
    serving: ServingDep,
    identity: InferenceKey,
    body: BodyDep,
    key: IdempotencyKey = None,
) -> Response:
    """Complete one or several prompts, whole or as a stream of server-sent events."""
    asked = parse_request(body, CompletionRequest)
    claim = Claim.of(identity.tenant_id, "completions", key, body) if key else None
    return await serving.answer(request, identity, asked, claim)


@router.post("/chat/completions/{answer_id}/cancel")
async def cancel(answer_id: str, cancels: CancelsDep, identity: InferenceKey) -> dict[str, object]:
    """Stop an answer under way.

    Its stream ends as usual, with usage, and what ran is paid.
    """
    if not await cancels.cancel(identity.tenant_id, answer_id.rpartition("-")[2]):
        raise errors.not_found("There is no such completion under way.", param="id")
    return {"id": answer_id, "object": "chat.completion.cancelled", "cancelled": True}
