"""Days of UTC in the queries of pages."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from registry.errors import Invalid
from server.database.clock import now_ms
from server.text.times import DAY_MS, day_of

_SHOWN_DAYS = 30
_MOST_DAYS = 366

Day = Annotated[str, Field(max_length=32)]


class Days(BaseModel):
    """Days of UTC, the first and the last; by default the last thirty."""

    model_config = ConfigDict(extra="forbid")

    start: Day = ""
    end: Day = ""

    def range_ms(self) -> tuple[int, int]:
        """[start, end) in Unix milliseconds. Raises Invalid."""
        today = now_ms() // DAY_MS * DAY_MS
        last = _day_ms("end", self.end) if self.end else today
        first = _day_ms("start", self.start) if self.start else last - (_SHOWN_DAYS - 1) * DAY_MS
        if not 0 <= last - first < _MOST_DAYS * DAY_MS:
            raise Invalid(
                f"start must be at most {_MOST_DAYS} days before end, and not after it.",
                param="start",
            )
        return first, last + DAY_MS

    def asked(self) -> dict[str, Any]:
        """The query with its days spelt out, as a page shows it. Raises Invalid."""
        start_ms, end_ms = self.range_ms()
        return self.model_dump() | {"start": day_of(start_ms), "end": day_of(end_ms - 1)}


def quick_ranges(at_ms: int) -> list[tuple[str, str, str]]:
    """(name, first day, last day) of the ranges that pages offer at a time."""
    today = datetime.fromtimestamp(at_ms / 1000, UTC)
    since = today.day  # days since the last month's end
    last_month = (today - timedelta(since)).day
    ago = {"Today": (0, 0), "Yesterday": (1, 1), "7 days": (6, 0), "30 days": (29, 0)}
    ago |= {"This month": (since - 1, 0), "Last month": (since - 1 + last_month, since)}
    return [
        (name, day_of(at_ms - first * DAY_MS), day_of(at_ms - last * DAY_MS))
        for name, (first, last) in ago.items()
    ]


def _day_ms(name: str, day: str) -> int:
    try:
        at_ms = int(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) * 1000
    except ValueError:
        at_ms = -1
    if at_ms < 0:
        message = f"{name} must be a date since 1970, like 2026-11-02."
        raise Invalid(message, param=name)
    return at_ms
