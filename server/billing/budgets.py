"""Budgets: how many tokens a request may be leased, so that no hard limit is ever exceeded.

The remaining amount is computed each time from the ledger's sums and the open holds, under a lock
of the tenant; no counter is kept that could differ from them.

BudgetExhausted   a hard budget does not cover the prompt and one token
BudgetHeld        it would without the holds of other requests
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.audit import record_audit
from registry.errors import Limited, QuotaExceeded
from server.accounts.tables import tenants
from server.billing.holds import get_hold
from server.billing.months import month_of
from server.billing.prices import get_price
from server.billing.rating import TokenPrices, amount_nanousd, format_usd
from server.billing.tables import IS_OPEN, budgets, holds, monthly_spend, tenant_accounts
from server.database.upsert import put

BudgetKind = Literal["monthly", "prepaid"]
Enforcement = Literal["hard", "soft"]

LEASE_TOKENS = 256
"""Tokens that one answer is leased at a time, so that many streams share a remaining budget.

The engine asks for more when a quarter of this is left.
"""
_LEASED_PART = 8
"""A lease takes an eighth of what is left, so that a request takes little from those behind it."""
_LEAST_LEASE = 16
"""Tokens of an answer below which a lease is not divided: they last until it is extended."""
CLOCK_SLACK_MS = 60_000
"""Largest difference expected between the clocks of gateways and engines.

An engine's clock decides which month a request belongs to, so this long before and after a month's
end a request must fit into the budgets of both months.
"""


class BudgetExhausted(QuotaExceeded):
    """The remaining part of a hard budget does not cover the amount that is needed."""

    def __init__(self, kind: BudgetKind, needed_nanousd: int) -> None:
        self.kind = kind
        self.needed_nanousd = needed_nanousd
        what = {
            "monthly": "The monthly budget does not cover this request: raise it, or wait for next "
            "month. GET /v1/budgets says what is left.",
            "prepaid": "The prepaid credit does not cover this request: add to it. "
            "GET /v1/budgets says what is left.",
        }
        super().__init__(what[kind])


class BudgetHeld(Limited):
    """A hard budget covers the amount only without the holds of other requests, which will end."""

    def __init__(self, held_nanousd: int) -> None:
        message = (
            f"Other requests of yours hold ${format_usd(held_nanousd)} of what is left of your "
            "money, until they end. Send this one again then."
        )
        super().__init__(message, retry_after_s=1.0, scope="budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit on what a tenant spends.

    amount_nanousd: if kind is "monthly", the most that may be spent in a UTC month; if kind is
    "prepaid", the balance that must remain.   needed_nanousd: what the smallest request needs
    that a hard budget refused, until a request passes while so much remains; 1 if there is none.
    """

    tenant_id: str
    kind: BudgetKind
    enforcement: Enforcement
    amount_nanousd: int
    needed_nanousd: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """A tenant's spending, balance and open holds at one moment.

    spent_nanousd: spending in the current month; around a month's end, in that one of the two
    months in which more was spent.
    """

    spent_nanousd: int
    balance_nanousd: int
    held_nanousd: int

    @property
    def available_nanousd(self) -> int:
        return self.balance_nanousd - self.held_nanousd

    def remaining(self, kind: BudgetKind, amount_nanousd: int) -> int:
        """Nano-dollars left of a budget; negative if it was set below the amount that is used."""
        if kind == "monthly":
            return amount_nanousd - self.spent_nanousd - self.held_nanousd
        return self.available_nanousd - amount_nanousd


# ---- inside a hold's transaction ----


def cover(
    conn: Connection,
    tenant_id: str,
    price: TokenPrices,
    num_prompt_tokens: int,
    wanted_tokens: int,
    *,
    num_answers: int,
    now_ms: int,
) -> int:
    """Return how many completion tokens a new hold may cover, at most `wanted_tokens`.

    A tenant without a hard budget gets `wanted_tokens`. A tenant with one gets a multiple of
    `num_answers`, and is locked until the transaction ends. Raises BudgetExhausted, BudgetHeld.
    """
    left = _lock_remaining(conn, tenant_id, now_ms)
    if left is None:
        return wanted_tokens
    kind, remaining, held, noted = left
    needed = amount_nanousd(num_prompt_tokens, 0, min(wanted_tokens, num_answers), price)
    # A request that costs nothing is always admitted, even if the remaining amount is negative.
    if needed > max(remaining, 0):
        if needed <= remaining + held:
            raise BudgetHeld(held)
        raise BudgetExhausted(kind, needed)
    if 1 < noted <= remaining:
        conn.execute(sa.update(budgets).filter_by(tenant_id=tenant_id).values(needed_nanousd=1))
    remaining -= amount_nanousd(num_prompt_tokens, 0, 0, price)
    return _lease(remaining, price, wanted_tokens, num_answers)


def extend(
    conn: Connection, request_id: str, wanted_tokens: int, *, num_answers: int, now_ms: int
) -> int:
    """Let an open hold cover up to `wanted_tokens` completion tokens in all; return its new lease.

    The lease stays the same if nothing remains. Returns 0 if the hold is no longer open or is being
    settled.
    """
    hold = get_hold(conn, request_id)
    if hold is None or hold.state != "open":
        return 0
    left = _lock_remaining(conn, hold.tenant_id, now_ms)
    # A locked row is skipped, not waited for: its settler may wait for the tenant, which is locked
    # here. A hold that is being settled needs no more tokens.
    query = sa.select(holds.c.token_lease).where(holds.c.request_id == request_id)
    query = query.where(IS_OPEN).with_for_update(skip_locked=True)
    lease: int | None = conn.scalar(query)
    if lease is None:
        return 0
    price = get_price(conn, hold.price_version)
    assert price is not None, "a hold names its price"
    more = wanted_tokens - lease
    if left is not None:
        more = _lease(left[1], price, more, num_answers)
    if more <= 0:
        return lease
    amount = amount_nanousd(hold.num_prompt_tokens, 0, lease + more, price)
    covered = sa.update(holds).where(holds.c.request_id == request_id)
    conn.execute(covered.values(token_lease=lease + more, amount_nanousd=amount))
    return lease + more


def note_refusal(conn: Connection, tenant_id: str, refused: BudgetExhausted) -> None:
    """Note what a refused request needs, unless so little is noted already."""
    noted, needed = budgets.c.needed_nanousd, refused.needed_nanousd
    update = sa.update(budgets).where((noted == 1) | (noted > needed))
    update = update.filter_by(tenant_id=tenant_id, kind=refused.kind, enforcement="hard")
    conn.execute(update.values(needed_nanousd=needed))


def read_sums(conn: Connection, tenant_id: str, now_ms: int) -> Sums:
    """Read the sums in one query, so that a hold that is just posted is in exactly one of them."""
    months = {month_of(now_ms + shift) for shift in (-CLOCK_SLACK_MS, 0, CLOCK_SLACK_MS)}
    row = conn.execute(_SUMS, {"tenant_id": tenant_id, "months": sorted(months)}).one()
    return Sums(
        spent_nanousd=int(row.spent), balance_nanousd=int(row.balance), held_nanousd=int(row.held)
    )


def _lock_remaining(
    conn: Connection, tenant_id: str, now_ms: int
) -> tuple[BudgetKind, int, int, int] | None:
    """Lock the tenant and return (kind, remaining amount) of the hard budget that leaves least, the
    amount that is held, and the highest noted need. Returns None, and locks nothing, if the tenant
    has no hard budget.
    """
    hard = conn.execute(_HARD, {"tenant_id": tenant_id}).all()
    if not hard:
        return None
    if conn.dialect.name != "sqlite":
        # The lock is a query of its own, so that the sums are read after it. SQLite needs no lock,
        # since it has one writer.
        conn.execute(_LOCK, {"tenant_id": tenant_id})
    sums = read_sums(conn, tenant_id, now_ms)
    left = [(sums.remaining(row.kind, row.amount_nanousd), row.kind) for row in hard]
    remaining, kind = min(left)
    return kind, remaining, sums.held_nanousd, max(row.needed_nanousd for row in hard)


def _lease(remaining: int, price: TokenPrices, wanted_tokens: int, num_answers: int) -> int:
    """Return how many completion tokens `remaining` nano-dollars lease, equally many per answer."""
    each = min(wanted_tokens // num_answers, LEASE_TOKENS)
    if price.completion_nanousd:
        payable = remaining // (num_answers * price.completion_nanousd)
        each = min(each, payable, max(_LEAST_LEASE, payable // _LEASED_PART))
    return num_answers * max(each, 0)


# ---- what operators set ----


def set_budget(conn: Connection, budget: Budget, *, now_ms: int) -> None:
    """Set a budget, effective from the next request on, and write an audit row."""
    assert budget.amount_nanousd >= 0
    put(conn, budgets, asdict(budget), "amount_nanousd")
    detail = f"{budget.kind} {budget.enforcement} {format_usd(budget.amount_nanousd)} dollars"
    record_audit(conn, budget.tenant_id, "budget.set", detail, at_ms=now_ms, actor="operator")


def remove_budget(
    conn: Connection,
    tenant_id: str,
    kind: BudgetKind,
    enforcement: Enforcement,
    *,
    now_ms: int,
) -> bool:
    """Remove a budget and write an audit row. Returns False if there was none."""
    query = sa.delete(budgets).filter_by(tenant_id=tenant_id, kind=kind, enforcement=enforcement)
    if conn.execute(query).rowcount == 0:
        return False
    detail = f"{kind} {enforcement}"
    record_audit(conn, tenant_id, "budget.remove", detail, at_ms=now_ms, actor="operator")
    return True


def get_budgets(conn: Connection, tenant_ids: Collection[str] | None = None) -> list[Budget]:
    """Return the budgets of tenants, at most four of each, or of all, in a fixed order."""
    query = sa.select(budgets)
    if tenant_ids is not None:
        query = query.where(budgets.c.tenant_id.in_(tenant_ids))
    query = query.order_by(budgets.c.tenant_id, budgets.c.kind, budgets.c.enforcement)
    return [Budget(**row._mapping) for row in conn.execute(query)]


# ---- SQL statements, built once because every request runs them ----

HAS_HARD_BUDGET = sa.exists().where(
    budgets.c.tenant_id == tenants.c.tenant_id, budgets.c.enforcement == "hard"
)
"""Whether a row of tenants has a hard budget."""

_TENANT = sa.bindparam("tenant_id", type_=sa.String)
_HARD = sa.select(budgets.c.kind, budgets.c.amount_nanousd, budgets.c.needed_nanousd).where(
    budgets.c.tenant_id == _TENANT, budgets.c.enforcement == "hard"
)
_LOCK = (
    sa.select(tenants.c.tenant_id)
    .where(tenants.c.tenant_id == _TENANT)
    .with_for_update(key_share=True)
)


def _sum_of(value: Any, *where: sa.ColumnElement[bool]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(sa.select(value).where(*where).scalar_subquery(), 0)


_SUMS = sa.select(
    _sum_of(
        sa.func.max(monthly_spend.c.amount_nanousd),
        monthly_spend.c.tenant_id == _TENANT,
        monthly_spend.c.month.in_(sa.bindparam("months", expanding=True)),
    ).label("spent"),
    _sum_of(tenant_accounts.c.balance_nanousd, tenant_accounts.c.tenant_id == _TENANT).label(
        "balance"
    ),
    _sum_of(
        sa.func.sum(holds.c.amount_nanousd),
        holds.c.tenant_id == _TENANT,
        IS_OPEN,
    ).label("held"),
)
