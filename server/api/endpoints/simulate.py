"""Simulations of what past usage would have cost under other prices, for the operator."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import Connection

from registry.catalog.adapter_rows import owner_of
from registry.errors import Invalid, NotFound
from server.accounts import tenants
from server.api.answer import Answer
from server.api.bodies import BodyFields, json_body
from server.api.deps import DatabaseDep, operators_router
from server.api.endpoints.prices import PriceFields, adapter_not_found
from server.api.times import parse_range
from server.billing.base_revisions import check_base
from server.billing.prices import get_price
from server.billing.rating import Prices
from server.billing.receipts.receipt import EntryKind
from server.billing.simulate import Book, BookScope, Line, simulate

router = operators_router()

MAX_SCOPES = 1000
TIMEOUT_S = 60.0

_Name = Annotated[str, Field(max_length=64)]
_BaseName = Annotated[str, Field(max_length=256)]
_Scopes = Annotated[dict[_Name, PriceFields], Field(default_factory=dict, max_length=MAX_SCOPES)]


class _Book(BodyFields):
    """A book of prices.

    The narrowest that names a price decides: the adapter, the base, the tenant, the plan, default.

    default: prices for all.   plans: prices by the plan's name.
    tenants: prices by the tenant's id or name.   bases: prices by the base model's name, for all.
    adapters: prices by the adapter's id.
    """

    default: PriceFields = Field(default_factory=PriceFields)
    plans: _Scopes
    tenants: _Scopes
    bases: Annotated[
        dict[_BaseName, PriceFields], Field(default_factory=dict, max_length=MAX_SCOPES)
    ]
    adapters: _Scopes


class _Simulation(BodyFields):
    """A time, and other prices for it; exactly one of price_version and book is given.

    start: Unix seconds or an ISO 8601 date or time; null for the start of this month of UTC.
    end: Unix seconds or an ISO 8601 date or time, not included; null for now.
    tenant: an id or a name; null for all tenants.
    price_version: the number of a version of prices.   book: prices that nobody has to pay.
    """

    start: _Name | None = None
    end: _Name | None = None
    tenant: _Name | None = None
    price_version: int | None = Field(None, ge=1, lt=2**31)
    book: _Book | None = None


class SimulatedAmounts(Answer):
    """Sums of entries, in nano-dollars and the same in dollars.

    actual: what was charged.   simulated: what would have been.   difference: how much more.
    """

    num_entries: int = Field(examples=[1240])
    actual_nanousd: int = Field(examples=[119_226_000])
    actual_usd: str = Field(examples=["0.119226000"])
    simulated_nanousd: int = Field(examples=[101_342_100])
    simulated_usd: str = Field(examples=["0.101342100"])
    difference_nanousd: int = Field(examples=[-17_883_900])
    difference_usd: str = Field(examples=["-0.017883900"])


class SimulatedLine(SimulatedAmounts):
    """A tenant's entries of one kind.   tenant: the name."""

    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    tenant: str | None = Field(examples=["acme"])
    kind: EntryKind


class SimulationAnswer(Answer):
    """A simulation of what was used from start_time until before end_time, in Unix seconds."""

    object: Literal["simulation"] = "simulation"
    start_time: int = Field(examples=[1_793_491_200])
    end_time: int = Field(examples=[1_796_083_200])
    data: list[SimulatedLine]
    total: SimulatedAmounts


@router.post("/billing/simulate")
async def simulate_billing(
    body: Annotated[_Simulation, json_body(_Simulation)], database: DatabaseDep
) -> SimulationAnswer:
    """Compute what past usage would have cost under other prices.

    Nothing is written. Usage for which no price is given costs what it did.
    """
    if (body.price_version is None) == (body.book is None):
        raise Invalid("Give either price_version or book.", param="book")
    start_ms, end_ms = parse_range(body.start, body.end)

    def look_up(conn: Connection) -> tuple[Book, str | None]:
        tenant_id = tenants.get_tenant(conn, body.tenant).tenant_id if body.tenant else None
        return _book(conn, body), tenant_id

    book, tenant_id = await database.read(look_up)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            lines = await simulate(database, book, start_ms, end_ms, tenant_id)
    except TimeoutError:
        raise Invalid(
            f"The simulation takes more than {TIMEOUT_S:g} s; ask for one tenant.", param="tenant"
        ) from None
    return SimulationAnswer(
        start_time=start_ms // 1000,
        end_time=end_ms // 1000,
        data=[SimulatedLine.of_record(line, tenant=line.tenant_name) for line in lines],
        total=_total(lines),
    )


def _book(conn: Connection, body: _Simulation) -> Book:
    """The prices to compute with. Raises Invalid and NotFound."""
    if body.price_version is not None:
        price = get_price(conn, body.price_version)
        if price is None:
            raise NotFound(
                f"There is no price version {body.price_version}.",
                code="price_version_not_found",
                param="price_version",
            )
        names = [field.name for field in dataclasses.fields(Prices)]
        return {("default", ""): {name: getattr(price, name) for name in names}}
    assert body.book is not None
    named: dict[tuple[BookScope, str], PriceFields] = {("default", ""): body.book.default}
    named |= {("plan", plan): prices for plan, prices in body.book.plans.items()}
    for tenant, prices in body.book.tenants.items():
        named["tenant", tenants.get_tenant(conn, tenant).tenant_id] = prices
    for base, prices in body.book.bases.items():
        check_base(conn, base)
        named["base", base] = prices
    for adapter_id, prices in body.book.adapters.items():
        if owner_of(conn, adapter_id) is None:
            raise adapter_not_found(adapter_id, param="book")
        named["adapter", adapter_id] = prices
    return {scope: prices.model_dump(exclude_none=True) for scope, prices in named.items()}


def _total(lines: list[Line]) -> SimulatedAmounts:
    names = ("num_entries", "actual_nanousd", "simulated_nanousd", "difference_nanousd")
    sums = {name: sum(getattr(line, name) for line in lines) for name in names}
    return SimulatedAmounts.of_record(SimpleNamespace(**sums))
