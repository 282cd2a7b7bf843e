"""How figures are written on a page, which are filters of the templates, and how they are drawn."""

from collections.abc import Iterable
from datetime import UTC, datetime

_UNITS = ("B", "kB", "MB", "GB", "TB")


def usd(nanousd: int) -> str:
    """Dollars: to the cent from one dollar on, else to three digits that say something."""
    sign, dollars = "−" if nanousd < 0 else "", abs(nanousd) / 1e9
    if dollars >= 1 or not nanousd:
        return f"{sign}${dollars:,.2f}"
    return f"{sign}${dollars:.{_decimals(dollars)}f}"


def _decimals(dollars: float) -> int:
    """Decimals that show three digits of an amount below one dollar; nine are all there are."""
    decimals = 3
    while dollars < 0.1 and decimals < 9:
        dollars, decimals = dollars * 10, decimals + 1
    return decimals


def count(number: float) -> str:
    """A number with its thousands set apart."""
    return f"{number:,.0f}"


def size(size_bytes: float) -> str:
    """Bytes in the largest unit that leaves one of them at least."""
    for unit in _UNITS[:-1]:
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} {_UNITS[-1]}"


def span(ms: float | None) -> str:
    """A length of time that is given in milliseconds."""
    if ms is None:
        return "–"
    if ms < 999.5:
        return f"{ms:.3g} ms"
    if ms < 120_000:
        return f"{ms / 1000:.3g} s"
    minutes = ms / 60_000
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def when(at_ms: float | None) -> str:
    """A moment in UTC, to the second."""
    if at_ms is None:
        return "–"
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def short(digest: str | None) -> str:
    """The beginning of a digest."""
    return digest[:12] if digest else "–"


def bars(
    parts: Iterable[tuple[str, int]], whole: int, least_width: float = 0.0
) -> list[tuple[str, int, float, float]]:
    """(name, number, beginning and width of its bar in hundredths of the whole) of each part."""
    drawn, begun = [], 0
    for name, number in parts:
        width = max(100 * number / whole, least_width)
        drawn.append((name, number, round(100 * begun / whole, 2), round(width, 2)))
        begun += number
    return drawn
