"""Faults: errors whose words are for clients, raised in every package without regard to HTTP.

A fault is raised as one of these kinds, or as a subclass where somebody catches just that one. Each
kind has one status, in `server.api.errors`.

Fault
├── Invalid            the request is wrong; param names the place
│   └── InvalidAdapter     the files are no adapter that this base model can serve
├── InvalidApiKey      the request has no key, or none that is valid
├── Forbidden          the caller's key may not do it
├── NotFound           the thing does not exist, or is another tenant's
├── Conflict           the request contradicts the present state; repeating it does not help
├── TooLarge           more bytes than allowed or declared
├── QuotaExceeded      an amount is used up; waiting does not help
├── Limited            a rate or a share is used up; waiting helps
├── Overloaded         more requests wait already than can be served in time
├── Unavailable        a part of the service is away for a while
├── NoRoom             the disk's reserve, or the room for pending parts, would be used
├── TimedOut           the request took longer than it may
├── Damaged            a tenant's stored data is gone or damaged
└── Failed             the server has a fault; the message tells no more

StorageError           the object store failed; its words are for operators, and name the object
└── ObjectNotFound
"""

from collections.abc import Mapping
from typing import ClassVar


class Fault(Exception):
    """An error whose str() is written for people and may be shown to the client.

    code: for programs.   param: the parameter at fault, as a path.   retry_after_s: seconds after
    which the same request may be sent again, or None.   details: more that a program may act on.
    """

    default_code: ClassVar[str | None] = None
    default_message: ClassVar[str] = ""
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str | None = None,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, int | bool] | None = None,
    ) -> None:
        super().__init__(message or self.default_message)
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.details = details or {}


class Invalid(Fault):
    """The request is wrong."""

    @classmethod
    def at(cls, param: str, why: str) -> "Invalid":
        """The fault of one parameter, whose path the message begins with."""
        return cls(f"{param}: {why}.", param=param)


class InvalidAdapter(Invalid):
    """The files are not an adapter that this base model can serve. `code` names the fault.

    param: the file at fault, the key of adapter_config.json, or the field of the upload.
    """


class InvalidApiKey(Fault):
    """The key is missing, unknown or revoked; nothing tells which, to give no help in guessing."""

    default_code = "invalid_api_key"
    default_message = "Incorrect API key provided."


class Forbidden(Fault):
    """The caller's key may not do what it asks for; param names what it lacks."""

    default_code = "insufficient_permissions"


class NotFound(Fault):
    """The thing does not exist or is another tenant's; the message does not tell which."""

    default_code = "not_found"


class Conflict(Fault):
    """The request contradicts the present state."""

    default_code = "conflict"


class TooLarge(Fault):
    """A body, a file or a part has more bytes than the limit, or than were declared."""

    default_code = "too_large"

    @classmethod
    def of(cls, what: str, size_bytes: int, limit_bytes: int) -> "TooLarge":
        return cls(f"{what} is {size_bytes} bytes; the limit is {limit_bytes}.", param=what)


class QuotaExceeded(Fault):
    """An amount is used up; waiting does not help."""

    default_code = "insufficient_quota"

    @classmethod
    def of(cls, quota: str, limit: int, remedy: str) -> "QuotaExceeded":
        """A tenant's limit on adapters, versions, aliases, bytes, pins, grants or uploads."""
        return cls(f"The limit {quota} of {limit} is reached; {remedy}.", code="quota_exceeded")


class Limited(Fault):
    """A rate or a share is used up; waiting helps.   scope: its name in a header to the client."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, scope: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.scope = scope


class Overloaded(Fault):
    """More requests wait already than can be served in time."""

    default_message = "The engine is overloaded. Try again shortly."
    default_retry_after_s = 1.0


class Unavailable(Fault):
    """A part of the service is away for a while; code says which."""


class NoRoom(Fault):
    """Bytes would take the disk's reserve, or more than pending parts may take."""

    default_code = "no_room"
    default_message = (
        "The server's disk has no room for this now. Send the same request again after the time "
        "in Retry-After, or ask the operator for room."
    )
    default_retry_after_s = 30.0


class TimedOut(Fault):
    """The request took longer than it may."""


class Damaged(Fault):
    """A tenant's stored data is gone or damaged."""


class Failed(Fault):
    """The server has a fault; the message says nothing but that it happened."""

    default_code = "internal_error"
    default_message = "The server had an error while processing your request."


class StorageError(Exception):
    """The object store failed; trying again later may help."""

    def __init__(self, *, key: str, reason: str) -> None:
        super().__init__(f"The object store failed on {key}: {reason}; try again later.")
        self.reason = reason


class ObjectNotFound(StorageError):
    """The store has no object under this key."""

    def __init__(self, *, key: str) -> None:
        super().__init__(key=key, reason="there is no such object")


def shown(text: str) -> str:
    """Quote a caller's text, cut to 100 characters and escaped: no control codes get through."""
    return ascii(text if len(text) <= 100 else text[:97] + "...")
