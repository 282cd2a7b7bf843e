"""Errors as clients receive them: OpenAI's error object, status and headers.

There is one class, and one function per situation makes it, so that each status is set in one
place.
"""

from server.api.limit_headers import retry_headers
from server.faults import Failed
from server.limits.inflow import LEAST_BYTES_PER_S
from server.text.json_object import JsonObject

_TOO_SLOW = f"came slower than {LEAST_BYTES_PER_S >> 10} KiB a second; send it again."


class ApiError(Exception):
    """An error to answer with. message: for people, and safe to show to the caller."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.details: JsonObject = {}


def error_body(error: ApiError) -> JsonObject:
    """The JSON body: always OpenAI's four keys, then details that a program may act on."""
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


def invalid_field(param: str, why: str) -> ApiError:
    """A field's value that cannot be accepted."""
    return invalid_request(f"{param}: {why}.", param=param)


def unsupported_parameter(param: str, why: str = "") -> ApiError:
    """A parameter that is not served is refused, never ignored."""
    message = f"The parameter '{param}' is not supported{': ' + why if why else ''}."
    return ApiError(400, message, param=param, code="unsupported_parameter")


def request_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413, f"The request body is over the limit of {limit_bytes} bytes.", code="request_too_large"
    )


def compressed_body() -> ApiError:
    message = "The body is compressed. Send it as it is, without the header content-encoding."
    return ApiError(415, message, code="compressed_body", headers={"accept-encoding": "identity"})


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


def origin_not_allowed(origin: str) -> ApiError:
    message = (
        f"Pages of {origin} may not call this server from a browser. Its operator can allow it "
        "with the setting cors_origins."
    )
    return ApiError(403, message, type="permission_error", code="origin_not_allowed")


def tenant_suspended() -> ApiError:
    message = "This account is suspended."
    return ApiError(403, message, type="permission_error", code="tenant_suspended")


def not_found(message: str, *, code: str = "not_found", param: str | None = None) -> ApiError:
    return ApiError(404, message, code=code, param=param)


def receipt_pending(retry_after_s: float) -> ApiError:
    message = "This request is not settled yet; ask for its receipt again when it has ended."
    headers = retry_headers(retry_after_s)
    return ApiError(404, message, code="receipt_pending", headers=headers)


def conflict(message: str, *, code: str = "conflict", param: str | None = None) -> ApiError:
    # A 409 calls for a different request; without this header OpenAI's clients would retry.
    return ApiError(409, message, code=code, param=param, headers={"x-should-retry": "false"})


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
    """A 429 that waiting does not end, so the client is told not to retry."""
    headers = {"x-should-retry": "false"}
    return ApiError(429, message, type="insufficient_quota", code=code, headers=headers)


# ---- unavailability, timeouts and faults of the server ----


def service_unavailable(message: str, *, code: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(
        503, message, type="service_unavailable", code=code, headers=retry_headers(retry_after_s)
    )


def insufficient_storage(message: str, *, code: str, retry_after_s: float) -> ApiError:
    headers = retry_headers(retry_after_s)
    return ApiError(507, message, type="insufficient_storage", code=code, headers=headers)


def too_many_connections(why: str = "The server has as many as it takes.") -> ApiError:
    message = f"There are too many connections. {why} Try again shortly."
    return service_unavailable(message, code="too_many_connections")


def bodies_busy() -> ApiError:
    message = "The server is receiving as many bodies as it can. Try again shortly."
    return service_unavailable(message, code="bodies_busy")


def body_timeout() -> ApiError:
    return ApiError(408, f"The body {_TOO_SLOW}", code="body_timeout")


def part_timeout() -> ApiError:
    return ApiError(408, f"The part {_TOO_SLOW}", code="part_timeout")


def internal_error() -> ApiError:
    """A 500 for a fault of the server; the client is not told its cause."""
    return ApiError(500, str(Failed()), type="server_error", code="internal_error")
