"""What tokens and kept adapters cost: immutable price versions, and the functions that multiply.

Money is integer nano-dollars; one nano-dollar a token is 0.001 dollars a million. A GB is 10^9
bytes, a month is 30 days.
"""

from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.audit import record_audit
from server.tables import price_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Nano-dollars a token."""

    prompt_nanousd: int
    cached_nanousd: int
    completion_nanousd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(TokenPrices):
    """storage_nanousd: for a GB in the store, pinned_nanousd: in device memory; an hour of it."""

    storage_nanousd: int
    pinned_nanousd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Price(Prices):
    """One version of the price book, from `effective_at_ms` until a later one takes effect."""

    price_version: int
    effective_at_ms: int


DEFAULT_PRICES = Prices(
    # $0.15 and $0.60 a million, half for a cached prompt: what small hosted models cost in public.
    prompt_nanousd=150,
    cached_nanousd=75,
    completion_nanousd=600,
    # $0.10 a GB-month. An adapter lies in the store and in an engine's disk cache: S3 Standard
    # lists $0.023 a GB-month, a gp3 volume $0.08.
    storage_nanousd=139_000,
    # $0.04 a GB-hour. An H100 of 80 GB rents for $2.70 to $3.80 an hour: 3.4 to 4.7 cents a GB.
    pinned_nanousd=40_000_000,
)

_GB = 10**9
_HOURS_A_MONTH = 30 * 24


def amount_nanousd(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, price: TokenPrices
) -> int:
    """The price of these tokens. prompt_tokens includes cached_tokens, which are priced once."""
    assert 0 <= cached_tokens <= prompt_tokens
    assert completion_tokens >= 0
    return (
        (prompt_tokens - cached_tokens) * price.prompt_nanousd
        + cached_tokens * price.cached_nanousd
        + completion_tokens * price.completion_nanousd
    )


def rated_nanousd(
    finish_reason: str,
    stop_cause: str,
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    price: TokenPrices,
) -> int:
    """What a request that ended like this pays: its tokens' price, or nothing."""
    # Nothing was generated in time, so the client got an error, not an answer.
    is_late = stop_cause in ("deadline", "first_token_timeout")
    is_unanswered = is_late and completion_tokens == 0
    if is_unanswered or not is_billable(finish_reason, stop_cause):
        return 0
    return amount_nanousd(prompt_tokens, cached_tokens, completion_tokens, price)


def is_billable(finish_reason: str, stop_cause: str) -> bool:
    """Whether this end is paid for: what we broke is counted and rated 0.

    A client that hangs up pays for what was generated, and so does one that runs into its deadline.
    """
    if stop_cause in ("engine_failure", "gateway_lost"):
        return False
    return finish_reason != "error" or stop_cause == "deadline"


def monthly_storage_nanousd(size_bytes: int, price: Prices) -> int:
    """Of an object in the store, for 30 days; to the nearest nano-dollar, halves up."""
    return _per_gb(size_bytes, price.storage_nanousd * _HOURS_A_MONTH)


def hourly_pin_nanousd(size_bytes: int, price: Prices) -> int:
    """Of an adapter that is kept in device memory; to the nearest nano-dollar, halves up."""
    return _per_gb(size_bytes, price.pinned_nanousd)


def add_price(
    conn: Connection,
    prices: Prices,
    *,
    effective_at_ms: int,
    now_ms: int,
    actor: str = "operator",
) -> Price:
    """A new version, audited; the versions before it stay as they are."""
    row = conn.execute(
        sa.insert(price_versions).values(
            effective_at_ms=effective_at_ms,
            prompt_nanousd=prices.prompt_nanousd,
            cached_nanousd=prices.cached_nanousd,
            completion_nanousd=prices.completion_nanousd,
            storage_nanousd=prices.storage_nanousd,
            pinned_nanousd=prices.pinned_nanousd,
            created_at_ms=now_ms,
        )
    )
    assert row.inserted_primary_key is not None
    price = get_price(conn, row.inserted_primary_key[0])
    record_audit(
        conn,
        at_ms=now_ms,
        actor=actor,
        action="price.add",
        target=str(price.price_version),
        detail=" ".join(f"{name}={value}" for name, value in asdict(price).items()),
    )
    return price


def ensure_price(conn: Connection, now_ms: int, prices: Prices = DEFAULT_PRICES) -> Price:
    """The current price; on a new database, `prices` from now on."""
    found = _latest(conn, now_ms)
    return found or add_price(conn, prices, effective_at_ms=now_ms, now_ms=now_ms)


def current_price(conn: Connection, now_ms: int) -> Price:
    """The version in effect. `ensure_price` has seen to it that there is one."""
    price = _latest(conn, now_ms)
    assert price is not None, "no price version is in effect: ensure_price was not called"
    return price


def list_prices(conn: Connection, limit: int) -> list[Price]:
    """The newest versions first, also those that are not in effect yet."""
    query = sa.select(price_versions).order_by(
        price_versions.c.effective_at_ms.desc(), price_versions.c.price_version.desc()
    )
    return [_price(row) for row in conn.execute(query.limit(limit))]


def get_price(conn: Connection, price_version: int) -> Price:
    query = sa.select(price_versions).where(price_versions.c.price_version == price_version)
    return _price(conn.execute(query).one())


def format_usd(nanousd: int) -> str:
    """Nano-dollars as exact decimal dollars, nine places."""
    sign = "-" if nanousd < 0 else ""
    dollars, rest = divmod(abs(nanousd), 1_000_000_000)
    return f"{sign}{dollars}.{rest:09d}"


def _per_gb(size_bytes: int, nanousd: int) -> int:
    return (size_bytes * nanousd + _GB // 2) // _GB


def _latest(conn: Connection, now_ms: int) -> Price | None:
    query = (
        sa.select(price_versions)
        .where(price_versions.c.effective_at_ms <= now_ms)
        .order_by(price_versions.c.effective_at_ms.desc(), price_versions.c.price_version.desc())
        .limit(1)
    )
    row = conn.execute(query).first()
    return _price(row) if row else None


def _price(row: sa.Row[tuple[int, ...]]) -> Price:
    return Price(
        price_version=row.price_version,
        effective_at_ms=row.effective_at_ms,
        prompt_nanousd=row.prompt_nanousd,
        cached_nanousd=row.cached_nanousd,
        completion_nanousd=row.completion_nanousd,
        storage_nanousd=row.storage_nanousd,
        pinned_nanousd=row.pinned_nanousd,
    )
