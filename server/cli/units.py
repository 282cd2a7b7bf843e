"""Sizes, times and money as people read them."""

from datetime import UTC, datetime


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
