"""Chat completions, completions, and their cancellation."""

from typing import Annotated, Literal

from fastapi import Header, Request
from fastapi.responses import Response
from pydantic import Field

from registry.errors import NotFound
from server.accounts.auth import Identity
from server.api.answer import Answer
from server.api.bodies import BodyDep
from server.api.completion_models import ChatCompletion, TextCompletion
from server.api.deps import CancelsDep, InferenceKey, ServingDep, tenants_router
from server.api.openai import ChatRequest, CompletionRequest, parse_request
from server.api.unknown_fields import IgnoredFields
from server.inference.idempotency import MAX_KEY_CHARACTERS, Claim

router = tenants_router()

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=MAX_KEY_CHARACTERS, pattern=r"^[ -~]+$"
    ),
]
"""A header of printable ASCII."""


class CompletionCancelled(Answer):
    """The answer to the cancellation of an answer under way."""

    id: str = Field(examples=["chatcmpl-0b7e61f3c2d94a58b1f6a9d3e4c85270"])
    object: Literal["chat.completion.cancelled"] = "chat.completion.cancelled"
    cancelled: Literal[True] = True


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat_completions(
    request: Request,
    serving: ServingDep,
    identity: InferenceKey,
    body: BodyDep,
    ignored: IgnoredFields,
    key: IdempotencyKey = None,
) -> Response:
    """Answer a chat, whole or as a stream of server-sent events."""
    asked = parse_request(body, ChatRequest, ignored)
    claim = _claim(request, identity, "chat/completions", key, body)
    return await serving.answer(request, identity, asked, claim)


@router.post("/completions", response_model=TextCompletion)
async def completions(
    request: Request,
    serving: ServingDep,
    identity: InferenceKey,
    body: BodyDep,
    ignored: IgnoredFields,
    key: IdempotencyKey = None,
) -> Response:
    """Complete one or several prompts, whole or as a stream of server-sent events."""
    asked = parse_request(body, CompletionRequest, ignored)
    claim = _claim(request, identity, "completions", key, body)
    return await serving.answer(request, identity, asked, claim)


@router.post("/chat/completions/{answer_id}/cancel")
async def cancel(
    answer_id: str, cancels: CancelsDep, identity: InferenceKey
) -> CompletionCancelled:
    """Stop an answer under way.

    Its stream ends as usual, with usage, and what ran is paid.
    """
    if not await cancels.cancel(identity.tenant_id, answer_id.rpartition("-")[2]):
        raise NotFound("There is no such completion under way.", param="id")
    return CompletionCancelled(id=answer_id)


def _claim(
    request: Request, identity: Identity, endpoint: str, key: str | None, body: bytes
) -> Claim | None:
    """The request's claim on its Idempotency-Key, if it has one."""
    request_id = request.state.request_id
    return Claim.of(identity.tenant_id, endpoint, key, body, request_id) if key else None
