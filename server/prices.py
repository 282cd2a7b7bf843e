"""The price books: immutable versions with effective dates. `server.rating` multiplies."""

from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.audit import record_audit
from server.ledger_tables import price_versions
from server.rating import Prices


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
            resident_nanousd=prices.resident_nanousd,
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
        resident_nanousd=row.resident_nanousd,
    )
