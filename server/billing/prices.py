"""The price books: immutable versions with effective dates. `server.billing.rating` applies them.

A version belongs to a scope: the default, a plan, a tenant or an adapter. Unless its scope is an
adapter, it may be for one base model and its adapters alone. Of the prices that are in effect at a
time the narrowest one counts: the adapter's; else, of those for the base model, the tenant's, the
plan's, the default; else, of those for any, the tenant's, the plan's, the default.
"""

import itertools
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import in_words, record_audit
from server.accounts.tables import tenants
from server.billing.base_revisions import bases_of
from server.billing.rating import Prices
from server.billing.tables import price_versions

Scope = Literal["adapter", "tenant", "plan", "default"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Scopes, the narrowest first."""

_NEVER_MS = 2**62
_IS_DEFAULT = (price_versions.c.scope == "default") & (price_versions.c.base_model == "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price(Prices):
    """A price version, in effect until a later one of its scope is, or until `until_ms`.

    scope_id: the adapter_id, tenant_id or plan name; "" for the default.
    base_model: the name of the only base model that it is for; "" for any. The default for any has
    no until_ms.
    """

    price_version: int
    scope: Scope = "default"
    scope_id: str = ""
    base_model: str = ""
    effective_at_ms: int
    until_ms: int | None = None

    def ends_by(self, at_ms: int) -> bool:
        return self.until_ms is not None and self.until_ms <= at_ms

    def breadth(self) -> tuple[bool, bool, int]:
        """The rank of what the version is for: the least of two is the narrower one's."""
        return self.scope != "adapter", not self.base_model, SCOPES.index(self.scope)


DEFAULT_PRICES = Prices(
    # $0.15 and $0.60 a million tokens, half for cached ones: public prices of small hosted models.
    prompt_nanousd=150,
    cached_nanousd=75,
    completion_nanousd=600,
    # $0.10 a GB-month. An adapter lies in the store and in an engine's disk cache: S3 Standard
    # lists $0.023 a GB-month, a gp3 volume $0.08.
    storage_nanousd=139_000,
    # $0.04 a GB-hour. An H100 of 80 GB rents for $2.70 to $3.80 an hour: 3.4 to 4.7 cents a GB.
    pinned_nanousd=40_000_000,
)


def price_for(
    conn: Connection,
    at_ms: int,
    *,
    tenant_id: str | None = None,
    plan: str | None = None,
    adapter_id: str | None = None,
    base_model: str = "",
) -> Price:
    """Return the price at `at_ms` for a tenant, plan and adapter; without any, the default price.

    plan: by default the tenant's own.   base_model: name of the base model, or of the adapter's; ""
    leaves out prices by base model. Before the first price of all, that one applies already.
    """
    asked = {"at_ms": at_ms, "tenant_id": tenant_id, "plan": plan, "adapter_id": adapter_id}
    asked["base_model"] = base_model
    newest = [_price(row) for row in conn.execute(_NEWEST_OF_EACH_SCOPE, asked)]
    return _narrowest(conn, newest, at_ms)


def price_with_end(
    conn: Connection, at_ms: int, *, tenant_id: str, base_model: str
) -> tuple[Price, int]:
    """Return `price_for` without an adapter, and the first time when another price may apply."""
    asked = {"at_ms": at_ms, "tenant_id": tenant_id, "plan": None, "adapter_id": None}
    asked["base_model"] = base_model
    newest = [_price(row) for row in conn.execute(_NEWEST_OF_EACH_SCOPE, asked)]
    changes = [price.until_ms for price in newest if price.until_ms and price.until_ms > at_ms]
    begins_ms = conn.scalar(_NEXT_BEGINNING, {"at_ms": at_ms})
    return _narrowest(conn, newest, at_ms), min([*changes, begins_ms or _NEVER_MS])


def prices_for(
    conn: Connection, at_ms: int, *, tenant_id: str, adapter_ids: Collection[str]
) -> dict[str, Price]:
    """Return {adapter_id: price at `at_ms`} for one tenant that uses these adapters.

    The base model of each is the one of its newest version, as gateways last named it.
    """
    bases = dict.fromkeys(adapter_ids, "") | bases_of(conn, adapter_ids)
    general = {
        base: price_for(conn, at_ms, tenant_id=tenant_id, base_model=base)
        for base in set(bases.values())
    }
    columns = price_versions.c
    query = sa.select(price_versions).where(
        columns.scope == "adapter",
        columns.scope_id.in_(adapter_ids),
        columns.effective_at_ms <= at_ms,
    )
    query = query.order_by(columns.effective_at_ms, columns.price_version)
    newest = {row.scope_id: _price(row) for row in conn.execute(query)}
    own = {adapter_id: price for adapter_id, price in newest.items() if not price.ends_by(at_ms)}
    return {adapter_id: own.get(adapter_id, general[base]) for adapter_id, base in bases.items()}


def price_of_adapter(conn: Connection, at_ms: int, tenant_id: str, adapter_id: str) -> Price:
    """Return the price at `at_ms` of an adapter that a tenant uses."""
    return prices_for(conn, at_ms, tenant_id=tenant_id, adapter_ids=[adapter_id])[adapter_id]


def add_price(
    conn: Connection,
    prices: Prices,
    *,
    effective_at_ms: int,
    now_ms: int,
    scope: Scope = "default",
    scope_id: str = "",
    base_model: str = "",
    until_ms: int | None = None,
) -> Price:
    """Add a price version and write an audit row; existing versions never change."""
    assert effective_at_ms >= now_ms, "a price of the past would change what has been billed"
    assert until_ms is None or until_ms > effective_at_ms
    assert not (base_model and scope == "adapter"), "an adapter has one base model"
    row = conn.execute(
        sa.insert(price_versions)
        .values(
            scope=scope,
            scope_id=scope_id,
            base_model=base_model,
            effective_at_ms=effective_at_ms,
            until_ms=until_ms,
            **{field.name: getattr(prices, field.name) for field in fields(Prices)},
            created_at_ms=now_ms,
        )
        .returning(price_versions)
    ).one()
    price = _price(row)
    tenant_id, target = scope_id if scope == "tenant" else None, str(price.price_version)
    detail, actor = in_words(asdict(price)), "operator"
    record_audit(conn, tenant_id, "price.add", detail, target=target, at_ms=now_ms, actor=actor)
    return price


def ensure_price(conn: Connection, now_ms: int) -> Price:
    """Return the current default price; a new database gets DEFAULT_PRICES, in effect now."""
    is_in_effect = _IS_DEFAULT & (price_versions.c.effective_at_ms <= now_ms)
    if conn.execute(sa.select(price_versions.c.price_version).where(is_in_effect)).first():
        return price_for(conn, now_ms)
    return add_price(conn, DEFAULT_PRICES, effective_at_ms=now_ms, now_ms=now_ms)


def list_prices(
    conn: Connection, limit: int, *, scope: Scope | None = None, scope_id: str | None = None
) -> list[Price]:
    """List versions of a scope or of all, latest start first, including those not in effect yet."""
    columns = price_versions.c
    query = sa.select(price_versions)
    if scope is not None:
        query = query.where(columns.scope == scope)
    if scope_id is not None:
        query = query.where(columns.scope_id == scope_id)
    query = query.order_by(columns.effective_at_ms.desc(), columns.price_version.desc())
    return [_price(row) for row in conn.execute(query.limit(limit))]


def get_price(conn: Connection, price_version: int) -> Price | None:
    """Return the version of this number, or None if there is none."""
    return get_prices(conn, [price_version]).get(price_version)


def get_prices(conn: Connection, numbers: Collection[int]) -> dict[int, Price]:
    """Return the versions that exist among `numbers`, by number."""
    rows = conn.execute(_BY_NUMBER, {"numbers": list(numbers)})
    return {row.price_version: _price(row) for row in rows}


def _narrowest(conn: Connection, newest: list[Price], at_ms: int) -> Price:
    """Return the price that applies, given the newest price of each scope."""
    in_effect = [price for price in newest if not price.ends_by(at_ms)]
    return min(in_effect or [_first_price(conn)], key=Price.breadth)


def _first_price(conn: Connection) -> Price:
    columns = price_versions.c
    query = sa.select(price_versions).where(_IS_DEFAULT)
    query = query.order_by(columns.effective_at_ms, columns.price_version).limit(1)
    row = conn.execute(query).first()
    assert row is not None, "there is no price: ensure_price was not called"
    return _price(row)


def _price(row: sa.Row[Any]) -> Price:
    values = row._asdict()
    del values["created_at_ms"]
    return Price(**values)


def _newest_of_each_scope() -> sa.CompoundSelect[Any]:
    columns = price_versions.c
    tenant_id = sa.bindparam("tenant_id", type_=sa.String)
    of_tenant = sa.select(tenants.c.plan).where(tenants.c.tenant_id == tenant_id)
    ids: dict[Scope, Any] = {
        "adapter": sa.bindparam("adapter_id", type_=sa.String),
        "tenant": tenant_id,
        "plan": sa.func.coalesce(
            sa.bindparam("plan", type_=sa.String), of_tenant.scalar_subquery()
        ),
        "default": "",
    }
    base_model = sa.bindparam("base_model", type_=sa.String)
    found = []
    for scope, of_base in itertools.product(SCOPES, (base_model, "")):
        if scope == "adapter" and of_base is base_model:
            continue
        query = sa.select(price_versions).where(
            columns.scope == scope,
            columns.scope_id == ids[scope],
            columns.base_model == of_base,
            columns.effective_at_ms <= sa.bindparam("at_ms", type_=sa.BigInteger),
        )
        query = query.order_by(columns.effective_at_ms.desc(), columns.price_version.desc())
        found.append(sa.select(query.limit(1).subquery()))
    return sa.union_all(*found)


# Built once, since every request runs them. The first takes seven look-ups in one index, however
# many prices there are.
_NEWEST_OF_EACH_SCOPE = _newest_of_each_scope()
_BY_NUMBER = sa.select(price_versions).where(
    price_versions.c.price_version.in_(sa.bindparam("numbers", expanding=True))
)
_NEXT_BEGINNING = sa.select(sa.func.min(price_versions.c.effective_at_ms)).where(
    price_versions.c.effective_at_ms > sa.bindparam("at_ms", type_=sa.BigInteger)
)
