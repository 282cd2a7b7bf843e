"""Faults as clients receive them: OpenAI's error object, a status and headers.

Each kind of fault has its answer in one table. Faults of HTTP itself are made here.
"""

from dataclasses import dataclass

from fastapi.exceptions import RequestValidationError

from lora.log_lines import trace_of
from registry.errors import (
    Conflict,
    Damaged,
    Failed,
    Fault,
    Forbidden,
    Invalid,
    InvalidApiKey,
    Limited,
    NoRoom,
    NotFound,
    Overloaded,
    QuotaExceeded,
    StorageError,
    TimedOut,
    TooLarge,
    Unavailable,
)
from registry.storage.faults import REMEDIES
from registry.uploads.ends import ProofFailed
from server import logs
from server.api.limit_headers import refusal_headers, retry_headers
from server.api.patterns import said
from server.billing.credits import IdempotencyKeyReused
from server.database.errors import DatabaseError
from server.inference.errors import (
    IdempotencyKeyInUse,
    IdempotencyKeyMismatch,
    IdempotentAnswerTooLong,
    metering_unavailable,
)
from server.limits.inflow import LEAST_BYTES_PER_S
from server.limits.rules import RateLimited
from server.text.json_object import JsonObject

_MAX_SHOWN_CHARACTERS = 64
_TOO_SLOW = f"came slower than {LEAST_BYTES_PER_S >> 10} KiB a second; send it again."


class TooSlow(Fault):
    """The request, or a part of it, did not arrive in time."""


class Compressed(Fault):
    """The body is compressed."""


class HeadTooLarge(Fault):
    """The request's headers are too large or too many."""


INVALID, _FINAL = "invalid_request_error", {"x-should-retry": "false"}
_ANSWERS: dict[type[Fault], tuple[int, str, dict[str, str]]] = {
    Invalid: (400, INVALID, {}),
    InvalidApiKey: (401, INVALID, {"www-authenticate": "Bearer"}),
    Forbidden: (403, "permission_error", {}),
    NotFound: (404, INVALID, {}),
    TooSlow: (408, INVALID, {}),
    # A 409 calls for a different request; without this header OpenAI's clients would retry.
    Conflict: (409, INVALID, _FINAL),
    IdempotencyKeyInUse: (409, "idempotency_error", {"x-should-retry": "true"}),
    IdempotentAnswerTooLong: (409, "idempotency_error", _FINAL),
    TooLarge: (413, INVALID, {}),
    Compressed: (415, INVALID, {"accept-encoding": "identity"}),
    IdempotencyKeyMismatch: (422, "idempotency_error", {}),
    IdempotencyKeyReused: (422, INVALID, {}),
    QuotaExceeded: (429, "insufficient_quota", _FINAL),
    Limited: (429, "rate_limit_error", {}),
    RateLimited: (429, "rate_limit_error", {}),
    HeadTooLarge: (431, INVALID, {}),
    Failed: (500, "server_error", {}),
    ProofFailed: (500, "server_error", _FINAL),
    # The stored object itself is at fault.
    Damaged: (502, "server_error", _FINAL),
    Overloaded: (503, "overloaded_error", {}),
    Unavailable: (503, "service_unavailable", {}),
    TimedOut: (504, "timeout_error", {}),
    NoRoom: (507, "insufficient_storage", {}),
}
"""Status, OpenAI's type and fixed headers of each kind; a subclass has those of its kind."""


@dataclass(eq=False)
class ErrorAnswer(Exception):
    """An error as a client receives it. error: OpenAI's four keys, and details for programs."""

    status: int
    error: JsonObject
    headers: dict[str, str]

    @property
    def body(self) -> JsonObject:
        return {"error": self.error}


KNOWN = (Fault, StorageError, DatabaseError, RequestValidationError, ErrorAnswer)
"""Errors that `answer_of` takes."""


def answer_of(error: Exception) -> ErrorAnswer:
    """The answer to a request that ended with one of the KNOWN errors.

    If the fault is ours, its place goes into the request's line of the log.
    """
    if isinstance(error, ErrorAnswer):
        return error
    fault = _fault_of(error)
    status, type_, fixed = next(_ANSWERS[cls] for cls in type(fault).__mro__ if cls in _ANSWERS)
    if status == 500:
        logs.note(trace=trace_of(error))
    told = {"message": str(fault), "type": type_, "param": fault.param, "code": fault.code}
    headers = dict(fixed)
    if isinstance(fault, RateLimited):
        headers |= refusal_headers(fault)
    elif isinstance(fault, Limited) and fault.scope:
        headers["x-ratelimit-scope"] = fault.scope
    if fault.retry_after_s is not None:
        headers |= retry_headers(fault.retry_after_s)
    return ErrorAnswer(status, {**told, **fault.details}, headers)


def _fault_of(error: Exception) -> Fault:
    """The fault that clients are told; which store or database failed, and how, is for the log."""
    match error:
        case Fault():
            return error
        case StorageError():
            message, retry_after_s = "The adapter store is not available. Try again shortly.", 2.0
            if error.reason in REMEDIES:
                message = (
                    "The adapter store is not usable until the operator of this server mends it. "
                    "The operator's list of problems says how."
                )
                retry_after_s = 60.0
            return Unavailable(message, code="storage_unavailable", retry_after_s=retry_after_s)
        case DatabaseError():
            return metering_unavailable()
        case RequestValidationError():
            first = error.errors()[0]
            # A name may be of the caller's choice, and of any length.
            places = (str(part)[:_MAX_SHOWN_CHARACTERS] for part in first["loc"][1:])
            param = ".".join(places) or None
            return Invalid(f"{param or 'The body'}: {said(first)}", param=param)
    raise AssertionError(f"unmapped {type(error).__name__}")


# ---- faults of requests as such ----


def unsupported_parameter(param: str, why: str = "") -> Invalid:
    """A parameter that is not served is refused, never ignored."""
    message = f"The parameter '{param}' is not supported{': ' + why if why else ''}."
    return Invalid(message, param=param, code="unsupported_parameter")


def missing_api_key() -> InvalidApiKey:
    return InvalidApiKey(
        "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'."
    )


def insufficient_permissions(scope: str) -> Forbidden:
    return Forbidden(f"This API key lacks the scope '{scope}'.")


def request_too_large(limit_bytes: int) -> TooLarge:
    message = f"The request body is over the limit of {limit_bytes} bytes."
    return TooLarge(message, code="request_too_large")


def compressed_body() -> Compressed:
    message = "The body is compressed. Send it as it is, without the header content-encoding."
    return Compressed(message, code="compressed_body")


def head_too_large() -> HeadTooLarge:
    return HeadTooLarge("The request's headers are too large or too many.", code="head_too_large")


def head_timeout() -> TooSlow:
    return TooSlow("The request's headers did not arrive in time.", code="head_timeout")


def body_timeout() -> TooSlow:
    return TooSlow(f"The body {_TOO_SLOW}", code="body_timeout")


def part_timeout() -> TooSlow:
    return TooSlow(f"The part {_TOO_SLOW}", code="part_timeout")


def too_many_connections(why: str = "The server has as many as it takes.") -> Unavailable:
    message = f"There are too many connections. {why} Try again shortly."
    return Unavailable(message, code="too_many_connections", retry_after_s=1.0)


def bodies_busy() -> Unavailable:
    message = "The server is receiving as many bodies as it can. Try again shortly."
    return Unavailable(message, code="bodies_busy", retry_after_s=1.0)
