"""Sizes, times and money as people read them."""

from datetime import UTC, datetime
from typing import Any

import typer

from server.text.times import parse_time


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 50_000 else f"{size_bytes:,} bytes"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def dollars(nanousd: int) -> str:
    """Dollars with all digits: in whole cents, the costs of small adapters would vanish."""
    whole, fraction = divmod(nanousd, 1_000_000_000)
    digits = f"{fraction:09}".rstrip("0").ljust(2, "0")
    return f"${whole:,}.{digits}"


def moment(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def time_option(help: str) -> Any:
    """An option that gives Unix seconds."""
    text = f"{help} A date, a date with a time, or Unix seconds; UTC unless it says a zone."
    return typer.Option(parser=_unix_seconds, metavar="TIME", help=text)


def _unix_seconds(text: str) -> int:
    try:
        seconds = parse_time(text) // 1000
        moment(seconds)  # Raises after the year 9999, where seconds are milliseconds.
        return seconds
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time: give a date as 2027-01-31, a date with a time as "
            "2027-01-31T18:00, or Unix seconds."
        ) from None
