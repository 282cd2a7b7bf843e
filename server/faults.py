"""Errors of the rooms below `server.api`, which know nothing of HTTP.

Each kind has one status in `server.api.foreign_errors`. A room raises the kinds as they are, or
subclasses of its own.

Fault
├── Invalid         the request is wrong; param names the place
├── Forbidden       the caller's key may not do it
├── NotFound        the thing does not exist, or is another tenant's
├── Conflict        the request contradicts the present state; repeating it does not help
├── QuotaExceeded   an amount is used up; waiting does not help
├── Limited         a rate or a share is used up; waiting helps
├── Overloaded      more requests wait already than can be served in time
├── Unavailable     a part of the service is away for a while
├── TimedOut        the request took longer than it may
├── Damaged         a tenant's stored data is gone or damaged
└── Failed          the server has a fault; the message tells no more
"""

from typing import ClassVar


class Fault(Exception):
    """An error whose str() is written for people and may be shown to the client.

    code: for programs.   param: the parameter at fault, as a path.   retry_after_s: seconds after
    which the same request may be sent again, or None.
    """

    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s


class Invalid(Fault):
    """The request is wrong."""


class Forbidden(Fault):
    """The caller's key may not do what it asks for; param names what it lacks."""

    default_code = "insufficient_permissions"


class NotFound(Fault):
    """The thing does not exist or is another tenant's; the message does not tell which."""

    default_code = "not_found"


class Conflict(Fault):
    """The request contradicts the present state."""

    default_code = "conflict"


class QuotaExceeded(Fault):
    """An amount is used up; waiting does not help."""

    default_code = "insufficient_quota"


class Limited(Fault):
    """A rate or a share is used up; waiting helps.   scope: its name in a header to the client."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, scope: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.scope = scope


class Overloaded(Fault):
    """More requests wait already than can be served in time."""


class Unavailable(Fault):
    """A part of the service is away for a while; code says which."""


class TimedOut(Fault):
    """The request took longer than it may."""


class Damaged(Fault):
    """A tenant's stored data is gone or damaged."""


class Failed(Fault):
    """The server has a fault; the message says nothing but that it happened."""

    default_code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request.")
