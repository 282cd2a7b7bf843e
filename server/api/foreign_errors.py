"""Errors of other rooms, turned into the errors that clients receive: each family has a status."""

from collections.abc import Callable
from typing import Any

from fastapi.exceptions import RequestValidationError

from lora.log_lines import trace_of
from registry import errors as registry_errors
from registry.errors import RegistryError, StorageError
from registry.storage_faults import REMEDIES
from server import faults, logs
from server.accounts.auth import AuthError, TenantSuspended
from server.api import errors
from server.api.errors import ApiError
from server.api.limit_headers import refusal_headers, retry_headers
from server.api.patterns import said
from server.billing.credits import IdempotencyKeyReused
from server.database.database import DatabaseError
from server.faults import Fault
from server.inference.errors import (
    IdempotencyKeyInUse,
    IdempotencyKeyMismatch,
    IdempotentAnswerTooLong,
    metering_unavailable,
)
from server.limits.rules import RateLimited

_MAX_SHOWN_CHARACTERS = 64


def from_rate_limit(error: RateLimited) -> ApiError:
    """A 429. A limiter that lost its state says so: it may refuse what it would else let pass."""
    limited = errors.rate_limited(
        str(error), retry_after_s=error.retry_after_ms / 1000, headers=refusal_headers(error)
    )
    if error.is_degraded:
        limited.details = {"limiter_degraded": True}
    return limited


def from_auth(error: AuthError) -> ApiError:
    is_suspended = isinstance(error, TenantSuspended)
    return errors.tenant_suspended() if is_suspended else errors.invalid_api_key()


def from_database(error: DatabaseError) -> ApiError:
    """A 503 that leaves out which database failed and how; that is for the log."""
    return from_fault(metering_unavailable())


def from_fault(fault: Fault) -> ApiError:
    """The error for a kind of fault; Idempotency-Keys have an error type of their own.

    A fault of the server leaves its trace in the log line of the request.
    """
    message, code, param = str(fault), fault.code, fault.param
    match fault:
        case IdempotencyKeyInUse() | IdempotencyKeyMismatch() | IdempotentAnswerTooLong():
            return _from_idempotency(fault)
        case IdempotencyKeyReused():
            return ApiError(422, message, code=code, param=param)
        case faults.Invalid():
            return errors.invalid_request(message, param=param, code=code)
        case faults.Forbidden():
            return errors.permission_error(message, param=param)
        case faults.NotFound():
            return errors.not_found(message, code=code or "not_found", param=param)
        case faults.Conflict():
            return errors.conflict(message, code=code or "conflict", param=param)
        case faults.QuotaExceeded():
            return errors.insufficient_quota(message, code=code or "insufficient_quota")
        case faults.Limited():
            headers = {"x-ratelimit-scope": fault.scope} if fault.scope else {}
            retry_after_s = fault.retry_after_s or 1.0
            return errors.rate_limited(message, retry_after_s=retry_after_s, headers=headers)
        case faults.Overloaded():
            return ApiError(
                503, message, type="overloaded_error", code=code, headers=_retry_of(fault)
            )
        case faults.Unavailable():
            return ApiError(
                503, message, type="service_unavailable", code=code, headers=_retry_of(fault)
            )
        case faults.TimedOut():
            return ApiError(504, message, type="timeout_error", code=code)
        case faults.Damaged():
            # The stored object itself is at fault, so the client is told not to retry.
            headers = {"x-should-retry": "false"}
            return ApiError(502, message, type="server_error", code=code, headers=headers)
        case faults.Failed():
            logs.note(trace=trace_of(fault))
            return errors.internal_error()
    raise AssertionError(f"unmapped {type(fault).__name__}")


def _from_idempotency(fault: Fault) -> ApiError:
    status = 422 if isinstance(fault, IdempotencyKeyMismatch) else 409
    headers = {}
    if isinstance(fault, IdempotencyKeyInUse):
        headers = {"x-should-retry": "true", **_retry_of(fault)}
    if isinstance(fault, IdempotentAnswerTooLong):
        headers = {"x-should-retry": "false"}
    return ApiError(
        status,
        str(fault),
        type="idempotency_error",
        code=fault.code,
        param="Idempotency-Key",
        headers=headers,
    )


def _retry_of(fault: Fault) -> dict[str, str]:
    return {} if fault.retry_after_s is None else retry_headers(fault.retry_after_s)


def from_registry(error: RegistryError) -> ApiError:
    """The error for a family of the registry's errors; the family decides the status."""
    match error:
        case registry_errors.Invalid():
            return errors.invalid_request(str(error), param=error.param, code=error.code)
        case registry_errors.NotFound():
            return errors.not_found(str(error), code=error.code, param=error.param)
        case registry_errors.UploadOffsetMismatch():
            mismatch = errors.conflict(str(error), code=error.code, param=error.param)
            mismatch.details = {"received_bytes": error.received_bytes}
            return mismatch
        case registry_errors.Conflict():
            return errors.conflict(str(error), code=error.code, param=error.param)
        case registry_errors.ProofFailed():
            headers = {"x-should-retry": "false"}
            return ApiError(500, str(error), type="server_error", code=error.code, headers=headers)
        case registry_errors.TooLarge():
            return ApiError(413, str(error), code=error.code, param=error.param)
        case registry_errors.QuotaExceeded():
            if error.retry_after_s is not None:
                return errors.rate_limited(str(error), retry_after_s=error.retry_after_s)
            return errors.insufficient_quota(str(error), code=error.code)
        case registry_errors.NoRoom():
            return errors.insufficient_storage(str(error), code=error.code, retry_after_s=30.0)
        case registry_errors.ValidatorUnavailable():
            return errors.service_unavailable(str(error), code=error.code, retry_after_s=5.0)
        case StorageError():
            return _from_storage(error)
    raise AssertionError(f"unmapped {type(error).__name__}")


def _from_storage(error: StorageError) -> ApiError:
    """A 503 without the error's own words, which name the object's key; the log has the reason."""
    message, retry_after_s = "The adapter store is not available. Try again shortly.", 2.0
    if error.reason in REMEDIES:
        message = "The adapter store is not usable until the operator of this server mends it. The "
        message, retry_after_s = f"{message}operator's list of problems says how.", 60.0
    return errors.service_unavailable(
        message, code="storage_unavailable", retry_after_s=retry_after_s
    )


def from_validation(error: RequestValidationError) -> ApiError:
    """The first of the faults that FastAPI found in a request."""
    first = error.errors()[0]
    # A name may be of the caller's choice, and of any length.
    param = ".".join(str(part)[:_MAX_SHOWN_CHARACTERS] for part in first["loc"][1:]) or None
    return errors.invalid_request(f"{param or 'The body'}: {said(first)}", param=param)


def api_error_of(error: Exception) -> ApiError | None:
    """The error that clients receive; None for an unforeseen error.

    If the fault is ours, its place goes into the request's line of the log.
    """
    if isinstance(error, ApiError):
        return error
    for family, to_api_error in FAMILIES.items():
        if isinstance(error, family):
            answer = to_api_error(error)
            if answer.status == 500:
                logs.note(trace=trace_of(error))
            return answer
    return None


FAMILIES: dict[type[Exception], Callable[[Any], ApiError]] = {
    Fault: from_fault,
    RegistryError: from_registry,
    AuthError: from_auth,
    DatabaseError: from_database,
    RateLimited: from_rate_limit,
    RequestValidationError: from_validation,
}

KNOWN: tuple[type[Exception], ...] = (ApiError, *FAMILIES)
"""Errors for which `api_error_of` has an answer."""
