"""What a customer is told when something goes wrong: OpenAI's error object, status and headers.

One class; each situation is a function that makes it, so that a status has one place.
"""

from typing import Any

from registry.errors import ModelNotFound
from server.api.limit_headers import retry_headers

_ADAPTER_RETRY_S = 5.0


class ApiError(Exception):
    """An answer that is an error. message: for people, and safe for the one who asked."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.details = details or {}


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON body: all four keys, always, and what a program needs to go on."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
            **error.details,
        }
    }


# ---- the caller's fault ----


def invalid_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported_parameter(param: str, why: str = "") -> ApiError:
    """A parameter that is not served is refused, never ignored."""
    message = f"The parameter '{param}' is not supported{': ' + why if why else ''}."
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unknown_token_id(vocabulary_size: int, *, param: str) -> ApiError:
    return ApiError(400, f"Token ids must be below {vocabulary_size}.", param=param)


def context_length_exceeded(*, limit: int, asked: int, param: str = "messages") -> ApiError:
    message = (
        f"This model's maximum context length is {limit} tokens; "
        f"the request needs {asked}. Shorten the prompt or lower max_tokens."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def request_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"The request body is over the limit of {limit_bytes} bytes.", code="request_too_large"
    )


def head_too_large() -> ApiError:
    return ApiError(431, "The request's headers are too large or too many.", code="head_too_large")


def head_timeout() -> ApiError:
    return ApiError(408, "The request's headers did not arrive in time.", code="head_timeout")


def invalid_api_key(message: str = "Incorrect API key provided.") -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def missing_api_key() -> ApiError:
    return invalid_api_key(
        "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'."
    )


def insufficient_permissions(scope: str) -> ApiError:
    return permission_error(f"This API key lacks the scope '{scope}'.")


def permission_error(message: str, *, param: str | None = None) -> ApiError:
    code = "insufficient_permissions"
    return ApiError(403, message, type="permission_error", code=code, param=param)


def tenant_suspended() -> ApiError:
    message = "This account is suspended."
    return ApiError(403, message, type="permission_error", code="tenant_suspended")


def model_not_found(model: str) -> ApiError:
    """The same for a model that is not there and for one that is not yours."""
    # The registry's own words: another sentence here would tell base names from adapter names.
    missing = ModelNotFound(model=model)
    return not_found(str(missing), code=missing.code, param=missing.param)


def not_found(message: str, *, code: str = "not_found", param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def receipt_pending(retry_after_s: float) -> ApiError:
    message = "This request is not settled yet; its receipt comes with its end."
    headers = retry_headers(retry_after_s)
    return ApiError(404, message, code="receipt_pending", headers=headers)


def conflict(message: str, *, code: str = "conflict", param: str | None = None) -> ApiError:
    # Our 409s need another request, not the same again; the client would retry without this.
    return ApiError(409, message, code=code, param=param, headers={"x-should-retry": "false"})


def idempotency_key_reused() -> ApiError:
    message = "This Idempotency-Key has posted something else; use a new one for each entry."
    return ApiError(422, message, code="idempotency_key_reused", param="Idempotency-Key")


# ---- Idempotency-Key, see server.inference.idempotency ----


def idempotency_key_in_use(retry_after_s: float = 1.0) -> ApiError:
    headers = {"x-should-retry": "true", **retry_headers(retry_after_s)}
    return _idempotency_error(
        409,
        "A request with this Idempotency-Key is under way; send it again to get its answer.",
        code="idempotency_key_in_use",
        headers=headers,
    )


def idempotency_key_mismatch() -> ApiError:
    return _idempotency_error(
        422,
        "This Idempotency-Key was used with another body; use a new key for a new request.",
        code="idempotency_key_mismatch",
    )


def idempotent_answer_too_long(request_id: str) -> ApiError:
    return _idempotency_error(
        409,
        "The request with this Idempotency-Key has run; its answer was too long to be kept. "
        f"What it cost is at GET /v1/receipts/{request_id}.",
        code="idempotent_answer_too_long",
        headers={"x-should-retry": "false"},
    )


def too_many_idempotency_keys(limit: int) -> ApiError:
    return rate_limited(
        f"{limit} Idempotency-Keys of your account are kept, each for a day. Send this request "
        "without one, or wait until some have gone.",
        retry_after_s=60.0,
    )


def _idempotency_error(
    status: int, message: str, *, code: str, headers: dict[str, str] | None = None
) -> ApiError:
    return ApiError(
        status,
        message,
        type="idempotency_error",
        code=code,
        param="Idempotency-Key",
        headers=headers,
    )


# ---- limits ----


def rate_limited(
    message: str, *, retry_after_s: float, headers: dict[str, str] | None = None
) -> ApiError:
    return ApiError(
        429,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={**(headers or {}), **retry_headers(retry_after_s)},
    )


def insufficient_quota(message: str, *, code: str = "insufficient_quota") -> ApiError:
    """Waiting does not help, so the client is told not to retry."""
    headers = {"x-should-retry": "false"}
    return ApiError(429, message, type="insufficient_quota", code=code, headers=headers)


def queue_share_exceeded(waiting: int, asked: int, limit: int, *, retry_after_s: float) -> ApiError:
    message = (
        f"{waiting} of your answers wait for their first token and this request asks for {asked} "
        f"more; the limit is {limit}. "
        "Try again when some have begun."
    )
    return rate_limited(
        message, retry_after_s=retry_after_s, headers={"x-ratelimit-scope": "queue;tenant"}
    )


# ---- the world's fault, and ours ----


def service_unavailable(message: str, *, code: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(
        503, message, type="service_unavailable", code=code, headers=retry_headers(retry_after_s)
    )


def overloaded(retry_after_s: float = 1.0) -> ApiError:
    message = "The engine is overloaded. Try again shortly."
    return ApiError(503, message, type="overloaded_error", headers=retry_headers(retry_after_s))


def draining() -> ApiError:
    message = "This server is about to stop and takes no new requests; another one will."
    return service_unavailable(message, code="draining")


def first_token_timeout(timeout_s: float, retry_after_s: float = 1.0) -> ApiError:
    message = f"No token came within {timeout_s:g} s: too many are waiting. Nothing was billed."
    return ApiError(
        503,
        message,
        type="overloaded_error",
        code="first_token_timeout",
        headers=retry_headers(retry_after_s),
    )


def engine_unavailable(retry_after_s: float = 1.0) -> ApiError:
    message = "The engine is not available; it is being restarted. Nothing was billed."
    return service_unavailable(message, code="engine_unavailable", retry_after_s=retry_after_s)


def metering_unavailable(retry_after_s: float = 1.0) -> ApiError:
    message = "Usage cannot be recorded right now, so the request was not served."
    return service_unavailable(message, code="metering_unavailable", retry_after_s=retry_after_s)


def request_timeout(timeout_s: float) -> ApiError:
    message = f"The request did not finish within {timeout_s:g} s."
    return ApiError(504, message, type="timeout_error", code="request_timeout")


def too_many_connections() -> ApiError:
    message = "The server has as many connections as it takes. Try again shortly."
    return service_unavailable(message, code="too_many_connections")


def uploads_busy(message: str, retry_after_s: float = 2.0) -> ApiError:
    return service_unavailable(message, code="uploads_busy", retry_after_s=retry_after_s)


def body_timeout(timeout_s: float) -> ApiError:
    message = f"The body did not arrive within {timeout_s:g} s; send it again."
    return ApiError(408, message, code="body_timeout")


def part_timeout(timeout_s: float) -> ApiError:
    message = f"The part did not arrive within {timeout_s:g} s; send it again."
    return ApiError(408, message, code="part_timeout")


def internal_error() -> ApiError:
    """A fault of ours: nothing of it is told but that it happened."""
    message = "The server had an error while processing your request."
    return ApiError(500, message, type="server_error", code="internal_error")


# ---- adapters that cannot be served ----


def adapter_loading(retry_after_s: float | None = None) -> ApiError:
    """An adapter is still on its way. retry_after_s: None where the engine cannot say."""
    message = (
        "The adapter is not loaded yet. Send the request again after the time in Retry-After. "
        "Nothing was billed."
    )
    wait_s = _ADAPTER_RETRY_S if retry_after_s is None else max(1.0, retry_after_s)
    return service_unavailable(message, code="adapter_loading", retry_after_s=wait_s)


def adapter_missing() -> ApiError:
    message = "The adapter's files are gone from the store; upload it again. Nothing was billed."
    return _broken_adapter(message, code="adapter_missing")


def adapter_corrupt() -> ApiError:
    message = (
        "The adapter's files in the store are not those that were uploaded; upload it again. "
        "Nothing was billed."
    )
    return _broken_adapter(message, code="adapter_corrupt")


def adapter_incompatible() -> ApiError:
    message = (
        "The adapter does not fit the base model that is served, in shape or in number format; "
        "train it on this base model and upload it again. Nothing was billed."
    )
    return invalid_request(message, param="model", code="adapter_incompatible")


def adapter_too_large() -> ApiError:
    message = (
        "The adapter is larger than what this server has room for; upload one of a lower rank "
        "or with fewer target modules. Nothing was billed."
    )
    return invalid_request(message, param="model", code="adapter_too_large")


def adapter_not_invoked(*, param: str) -> ApiError:
    message = (
        "The prompt does not contain the adapter's invocation tokens (alora_invocation_tokens); "
        "add them, or ask the base model. Nothing was billed."
    )
    return invalid_request(message, param=param, code="adapter_not_invoked")


def _broken_adapter(message: str, *, code: str) -> ApiError:
    """The stored object itself is at fault, so the client is told not to retry."""
    headers = {"x-should-retry": "false"}
    return ApiError(502, message, type="server_error", code=code, headers=headers)
