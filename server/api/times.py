"""Times that callers give: Unix seconds, or ISO 8601 dates and times."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from registry.errors import Invalid
from server.database.clock import now_ms
from server.text.times import parse_time

_LAST_S = 253_402_300_799
"""The last second of the year 9999. A time in milliseconds is larger if it is after 1978."""
_TOO_LARGE = "{seconds} is later than the year 9999. Send seconds since 1970, not milliseconds."


def _checked(seconds: int) -> int:
    if seconds > _LAST_S:
        raise PydanticCustomError("unix_seconds", _TOO_LARGE, {"seconds": seconds})
    return seconds


UnixSeconds = Annotated[int, AfterValidator(_checked)]
Time = Annotated[str | None, Query(max_length=64)]
"""A time as `parse_range` reads it: a date, a date with a time, or Unix seconds."""


def parse_range(start: str | None, end: str | None) -> tuple[int, int]:
    """[start, end) in Unix milliseconds; by default from the start of this month until now.

    Raises Invalid.
    """
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    start_ms = int(month.timestamp() * 1000) if start is None else _parse_time("start", start)
    end_ms = now_ms() + 1 if end is None else _parse_time("end", end)
    check_order(start_ms, end_ms)
    return start_ms, end_ms


def check_order(start: int, end: int, names: tuple[str, str] = ("start", "end")) -> None:
    """Raises Invalid unless start is before end."""
    if start >= end:
        raise Invalid(
            f"{names[0]} must be before {names[1]}, and before now if {names[1]} is left out. Both "
            "are in seconds.",
            param=names[0],
        )


def _parse_time(name: str, text: str) -> int:
    """Unix milliseconds of a time that a caller gives. Raises Invalid."""
    try:
        at_ms = parse_time(text)
        _checked(at_ms // 1000)
        return at_ms
    except PydanticCustomError as error:
        raise Invalid(f"{name}: {error.message()}", param=name) from None
    except (ValueError, OverflowError):
        raise Invalid(
            f"{name} must be Unix seconds or an ISO 8601 date, not {text[:40]!r}.", param=name
        ) from None
