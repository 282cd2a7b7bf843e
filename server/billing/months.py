"""Months of the bill, in UTC, written `2026-11`."""

from datetime import UTC, datetime


def month_of(at_ms: int) -> str:
    """The month of a moment in Unix milliseconds."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m}"


def next_month(month: str) -> str:
    year, number = (int(part) for part in month.split("-"))
    return f"{year + number // 12:04d}-{number % 12 + 1:02d}"


def month_before(month: str) -> str:
    year, number = (int(part) for part in month.split("-"))
    return f"{year - (number == 1):04d}-{(number - 2) % 12 + 1:02d}"


def end_of(month: str) -> int:
    """The first moment after a month, in Unix milliseconds."""
    year, number = (int(part) for part in next_month(month).split("-"))
    return int(datetime(year, number, 1, tzinfo=UTC).timestamp()) * 1000
