"""Reasons why a request is not served to its end: one function per situation makes the fault.

A request that ends with one of these faults is not billed, unless its deadline or the work of its
grammar cut off an answer that had begun.
"""

from collections.abc import Sequence

from registry.errors import (
    Conflict,
    Damaged,
    Failed,
    Fault,
    Invalid,
    Limited,
    Overloaded,
    TimedOut,
    Unavailable,
)

_ADAPTER_RETRY_S = 5.0
_MAX_SHOWN_IDS = 8


# ---- the request itself ----


def unknown_token_ids(token_ids: Sequence[int], vocabulary_size: int, *, param: str) -> Invalid:
    shown = ", ".join(map(str, token_ids[:_MAX_SHOWN_IDS]))
    why = f"out of vocabulary: {shown}; token ids must be below {vocabulary_size}"
    return Invalid.at(param, why)


def empty_prompt(*, param: str) -> Invalid:
    return Invalid.at(param, "the prompt is empty; send at least one token")


def context_length_exceeded(*, limit: int, at_least: int, param: str) -> Invalid:
    """A prompt and answer that are too long.

    Clients that shorten the prompt know this error by its words: "This model's maximum context
    length is" (LiteLLM, pydantic-ai, CrewAI), "context_length_exceeded" and "exceeds the context
    window" (LangChain, the second where there is no status).
    """
    message = (
        f"This model's maximum context length is {limit} tokens; the request needs at least "
        f"{at_least}, which exceeds the context window (context_length_exceeded). Shorten the "
        "prompt or lower max_tokens."
    )
    return Invalid(message, param=param, code="context_length_exceeded")


def request_suspected(retry_after_s: float | None) -> Fault:
    """A request that engines may have died of.   retry_after_s: None if one did, serving it alone.

    It is refused only then; else it is sent again when it can be tried, or is forgotten.
    """
    if retry_after_s is None:
        message = "An engine died while it served nothing but exactly this request; change it."
        return Invalid(message, code="request_quarantined")
    message = (
        "Engines died while they served this request among others, so it is tried where nobody "
        "else is served. Send it again after the time in Retry-After. Nothing was billed."
    )
    return Unavailable(message, code="request_suspected", retry_after_s=max(1.0, retry_after_s))


# ---- limits, and room ----


def queue_share_exceeded(waiting: int, asked: int, limit: int, *, retry_after_s: float) -> Limited:
    message = (
        f"{waiting} of your answers wait for their first token and this request asks for {asked} "
        f"more; the limit is {limit}. "
        "Try again when some have begun."
    )
    return Limited(message, retry_after_s=retry_after_s, scope="queue;tenant")


def first_token_timeout(timeout_s: float) -> Overloaded:
    message = f"No token came within {timeout_s:g} s: too many requests wait. Nothing was billed."
    return Overloaded(message, code="first_token_timeout")


def draining() -> Unavailable:
    message = "This server is shutting down and takes no new requests; another server will."
    return Unavailable(message, code="draining", retry_after_s=1.0)


def engine_unavailable() -> Unavailable:
    message = "The engine is not available; it is being restarted. Nothing was billed."
    return Unavailable(message, code="engine_unavailable", retry_after_s=1.0)


def metering_unavailable() -> Unavailable:
    message = "Usage cannot be recorded right now, so the request was not served."
    return Unavailable(message, code="metering_unavailable", retry_after_s=1.0)


def request_timeout(timeout_s: float) -> TimedOut:
    message = f"The request did not finish within {timeout_s:g} s."
    return TimedOut(message, code="request_timeout")


# ---- requests that an engine accepted and failed ----


def adapter_loading(retry_after_s: float | None = None) -> Unavailable:
    """An adapter is still being loaded. retry_after_s: None if the engine cannot tell."""
    message = (
        "The adapter is not loaded yet. Send the request again after the time in Retry-After. "
        "Nothing was billed."
    )
    wait_s = _ADAPTER_RETRY_S if retry_after_s is None else max(1.0, retry_after_s)
    return Unavailable(message, code="adapter_loading", retry_after_s=wait_s)


def failed(cause: str, **params: str | None) -> Fault:
    """The fault of a request that an engine ended; its code is the cause.

    params: the paths of the `prompt` and of the `constraint` in the request.
    """
    if cause not in FAILURES:
        return Failed()
    if (place := _PLACES.get(cause)) is None:
        return Damaged(FAILURES[cause], code=cause)
    return Invalid(FAILURES[cause], code=cause, param=params.get(place, place))


FAILURES = {
    "adapter_missing": "The adapter's files are gone from the store; upload it again. "
    "Nothing was billed.",
    "adapter_corrupt": "The adapter's files in the store are not those that were uploaded; upload "
    "it again. Nothing was billed.",
    "adapter_incompatible": "The adapter does not fit the base model that is served, in shape or "
    "in number format; train it on this base model and upload it again. Nothing was billed.",
    "adapter_too_large": "The adapter is larger than what this server has room for; upload one of "
    "a lower rank or with fewer target modules. Nothing was billed.",
    "request_too_long": "Prompt and answer may become too long for the memory that this adapter "
    "leaves; shorten the prompt, lower max_tokens, or use an adapter of a lower rank. Nothing was "
    "billed.",
    "adapter_not_invoked": "The prompt does not contain the adapter's invocation tokens "
    "(alora_invocation_tokens); add them, or ask the base model. Nothing was billed.",
    "constraint_too_slow": "The schema or grammar takes too much work for a token; send a simpler "
    "one. The tokens that were generated until then are billed.",
}
"""Words of the faults by an engine's cause."""
_PLACES = {
    "adapter_incompatible": "model",
    "adapter_too_large": "model",
    "request_too_long": "prompt",
    "adapter_not_invoked": "prompt",
    "constraint_too_slow": "constraint",
}
"""Places of the faults that are the request's; by the others, a tenant's stored data is damaged."""


# ---- Idempotency-Key, see server.inference.idempotency ----


class IdempotencyKeyInUse(Conflict):
    """The same request is under way; sent again a little later, it gets the answer."""

    default_code = "idempotency_key_in_use"

    def __init__(self) -> None:
        message = (
            "A request with this Idempotency-Key is under way; send it again to get its answer."
        )
        super().__init__(message, param="Idempotency-Key", retry_after_s=1.0)


class IdempotencyKeyMismatch(Conflict):
    default_code = "idempotency_key_mismatch"

    def __init__(self) -> None:
        message = (
            "This Idempotency-Key was used with another body; use a new key for a new request."
        )
        super().__init__(message, param="Idempotency-Key")


class IdempotentAnswerTooLong(Conflict):
    default_code = "idempotent_answer_too_long"

    def __init__(self, request_id: str) -> None:
        message = (
            "The request with this Idempotency-Key has run; its answer was too long to be kept. "
            f"What it cost is at GET /v1/receipts/{request_id}."
        )
        super().__init__(message, param="Idempotency-Key")


def too_many_idempotency_keys(limit: int) -> Limited:
    message = (
        f"Your account has used {limit} Idempotency-Keys, which are kept for a day each. Send this "
        "request without one, or wait until some have expired."
    )
    return Limited(message, retry_after_s=60.0)
