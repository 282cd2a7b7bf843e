"""Times as answers show them, and as callers give them."""

import functools
from datetime import UTC, datetime, timedelta

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def unix_seconds(at_ms: int | None) -> int | None:
    """A time in whole Unix seconds; None if there is none."""
    return None if at_ms is None else at_ms // 1000


def rfc3339(at_ms: int | None) -> str | None:
    """A time as text in UTC, to the millisecond."""
    if at_ms is None:
        return None
    seconds, ms = divmod(at_ms, 1000)
    return f"{_to_the_second(seconds)}.{ms:03d}Z"


def day_of(at_ms: int | None) -> str:
    """The day of UTC of a time that is there."""
    assert at_ms is not None
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d}"


def parse_time(text: str) -> int:
    """Unix milliseconds of Unix seconds, of a date or of a date with a time; UTC without a zone.

    Raises ValueError, OverflowError.
    """
    if text.lstrip("-").isdigit():
        return int(text) * 1000
    moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=moment.tzinfo or UTC)
    # timestamp() is a float of seconds, which may be a millisecond low.
    return (moment - _EPOCH) // timedelta(milliseconds=1)


@functools.lru_cache(maxsize=4096)
def _to_the_second(seconds: int) -> str:
    # Cached, as neighbours in the ledger share their seconds: formatting each was 6 % of posting.
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
