"""Why something cannot be done, said without HTTP: the rooms below `server.api` raise these.

Each kind has one status in `server.api.foreign_errors`. A room raises the kinds as they are, or
subclasses of its own.

Fault
├── Invalid         what was asked is wrong; param names the place
├── NotFound        there is no such thing, or it is another tenant's
├── Conflict        it does not go with what is there; the same again would not, either
├── QuotaExceeded   an amount is used up; waiting does not help
├── Limited         a share is used up; waiting helps
├── Overloaded      more waits already than can be served in time
├── Unavailable     a part of the service is away for a while
├── TimedOut        it took longer than it may
├── Damaged         what is kept of a tenant's own is gone or damaged
└── Failed          a fault of ours; nothing more is told of it
"""

from typing import ClassVar


class Fault(Exception):
    """str() is for people, and safe for the one who asked.

    code: for programs.   param: the parameter at fault, as a path.   retry_after_s: seconds after
    which the same may be asked again, or None.
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
    """What was asked is wrong."""


class NotFound(Fault):
    """There is no such thing, or it is another tenant's: the difference is not told."""

    default_code = "not_found"


class Conflict(Fault):
    """It does not go with what is there."""

    default_code = "conflict"


class QuotaExceeded(Fault):
    """An amount is used up; waiting does not help."""

    default_code = "insufficient_quota"


class Limited(Fault):
    """A share is used up; waiting helps. scope: which, as clients are told in a header."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, scope: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.scope = scope


class Overloaded(Fault):
    """More waits already than can be served in time."""


class Unavailable(Fault):
    """A part of the service is away for a while; code says which."""


class TimedOut(Fault):
    """It took longer than it may."""


class Damaged(Fault):
    """What is kept of a tenant's own is gone or damaged."""


class Failed(Fault):
    """A fault of ours: the message says nothing but that it happened."""

    default_code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request.")
