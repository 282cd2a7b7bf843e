"""The operator's prices: add new versions, and list those that exist."""

import dataclasses
from typing import Annotated, Literal

from fastapi import Query
from pydantic import Field
from sqlalchemy import Connection

from registry.catalog.adapter_rows import owner_of
from registry.errors import Fault, Invalid, NotFound
from server.accounts import tenants
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import BasesDep, DatabaseDep, PriceTagsDep, operators_router
from server.api.times import UnixSeconds
from server.billing import prices
from server.billing.base_revisions import check_base
from server.billing.prices import Price, Scope
from server.database.clock import now_ms

router = operators_router()

MAX_PRICES = 1000
# At most a thousand dollars: a million tokens at that price still fit 63 bits.
Nanousd = Annotated[int | None, Field(ge=0, le=10**12)]


class PriceFields(BodyFields):
    """Prices in nano-dollars, of which a dollar has 10^9; null where none is given.

    prompt_nanousd: the price of a prompt token.
    cached_nanousd: the price of a prompt token that was found in the prefix cache.
    completion_nanousd: the price of a token of an answer.
    storage_nanousd: the price of a GB (10^9 bytes) of stored adapters for an hour.
    pinned_nanousd: the price of a GB of pinned adapters for an hour.
    resident_nanousd: the price of a GB of adapters in an engine's memory for an hour.
    """

    prompt_nanousd: Nanousd = None
    cached_nanousd: Nanousd = None
    completion_nanousd: Nanousd = None
    storage_nanousd: Nanousd = None
    pinned_nanousd: Nanousd = None
    resident_nanousd: Nanousd = None


class _NewPrice(PriceFields):
    """A new version of prices.

    scope: whom it is for; the narrowest that applies decides, and `default` is the widest.
    scope_id: a tenant's id or name, an adapter's id, or a plan's name; empty for default.
    base_model: the name of the only base model that it is for, with its adapters; empty for any.
    effective_at: its beginning in Unix seconds; now if it is left out.
    until: its end in Unix seconds; null for none.
    """

    scope: Scope = "default"
    scope_id: str = Field("", max_length=64)
    base_model: str = Field("", max_length=256)
    effective_at: UnixSeconds | None = None
    until: UnixSeconds | None = None


class PriceAnswer(Answer):
    """A version of prices, in nano-dollars.

    scope_id: a tenant's or an adapter's id, or a plan's name; null of the default.
    base_model: the name of the only base model that it is for; null for any.
    effective_at, until: Unix seconds; without an end, until there is a newer version of the scope.
    prompt_nanousd, cached_nanousd, completion_nanousd: of a token.
    storage_nanousd, pinned_nanousd, resident_nanousd: of a GB (10^9 bytes) for an hour.
    """

    object: Literal["price"] = "price"
    price_version: int = Field(examples=[4])
    scope: Scope
    scope_id: str | None = Field(examples=["ad_0f6e2b7c9d1a4e538b20c7f1d3a5964e"])
    base_model: str | None = Field(examples=[None])
    effective_at: int = Field(examples=[1_796_083_200])
    until: int | None = Field(examples=[1_798_761_600])
    prompt_nanousd: int = Field(examples=[150])
    cached_nanousd: int = Field(examples=[75])
    completion_nanousd: int = Field(examples=[600])
    storage_nanousd: int = Field(examples=[139_000])
    pinned_nanousd: int = Field(examples=[40_000_000])
    resident_nanousd: int = Field(examples=[0])


class PriceList(ListAnswer[PriceAnswer]):
    """Versions of prices, the newest first."""


@router.get("/prices")
async def list_prices(
    database: DatabaseDep,
    scope: Scope | None = None,
    scope_id: Annotated[str | None, Query(max_length=64)] = None,
) -> PriceList:
    """List the versions of prices, newest first, with those that are not in effect yet."""
    found = await database.read(
        lambda conn: prices.list_prices(conn, MAX_PRICES + 1, scope=scope, scope_id=scope_id)
    )
    data = [_price(price) for price in found[:MAX_PRICES]]
    return PriceList(data=data, has_more=len(found) > MAX_PRICES)


@router.post("/prices", status_code=201)
async def add_price(
    body: Annotated[_NewPrice, json_body(_NewPrice)],
    database: DatabaseDep,
    bases: BasesDep,
    price_tags: PriceTagsDep,
) -> PriceAnswer:
    """Add a version of prices.

    A price that is left out is the one that applies to the scope and base model at that time.
    """
    now = now_ms()
    at_ms = _effective_at_ms(body, now)
    named = body.model_dump(include=set(PriceFields.model_fields), exclude_none=True)

    def write(conn: Connection) -> Price:
        if body.base_model:
            check_base(conn, body.base_model, [entry.name for entry in bases.entries])
        scope_id, before = _look_up(conn, body, at_ms)
        return prices.add_price(
            conn,
            dataclasses.replace(before, **named),
            scope=body.scope,
            scope_id=scope_id,
            base_model=body.base_model,
            effective_at_ms=at_ms,
            until_ms=None if body.until is None else body.until * 1000,
            now_ms=now,
        )

    added = await database.write(write)
    price_tags.forget()
    return _price(added)


def _effective_at_ms(body: _NewPrice, now: int) -> int:
    if body.effective_at is not None and body.effective_at < now // 1000:
        raise Invalid(
            "effective_at is in the past; a price takes effect now or later.", param="effective_at"
        )
    at_ms = max(now, (body.effective_at or 0) * 1000)
    if body.until is not None and body.scope == "default" and not body.base_model:
        raise Invalid("The default price has no end; add another instead.", param="until")
    if body.until is not None and body.until * 1000 <= at_ms:
        raise Invalid("until must be later than effective_at.", param="until")
    return at_ms


def _look_up(conn: Connection, body: _NewPrice, at_ms: int) -> tuple[str, Price]:
    """The scope's id, and its price at that time. Raises Invalid and not-found errors."""
    scope_id, base_model = body.scope_id, body.base_model
    match body.scope:
        case "default":
            if scope_id:
                raise Invalid("The default has no scope_id.", param="scope_id")
            return "", prices.price_for(conn, at_ms, base_model=base_model)
        case "plan":
            tenants.check_plan(scope_id, param="scope_id")
            before = prices.price_for(conn, at_ms, plan=scope_id, base_model=base_model)
            return scope_id, before
        case "tenant":
            tenant_id = tenants.get_tenant(conn, scope_id).tenant_id
            asked = {"tenant_id": tenant_id, "base_model": base_model}
            return tenant_id, prices.price_for(conn, at_ms, **asked)
        case "adapter":
            owner_id = owner_of(conn, scope_id)
            if owner_id is None:
                raise adapter_not_found(scope_id, param="scope_id")
            if base_model:
                message = "An adapter has one base model; leave base_model out."
                raise Invalid(message, param="base_model")
            return scope_id, prices.price_of_adapter(conn, at_ms, owner_id, scope_id)


def adapter_not_found(adapter_id: str, *, param: str) -> Fault:
    message = f"There is no adapter with the id {adapter_id!r}."
    return NotFound(message, code="adapter_not_found", param=param)


def _price(price: Price) -> PriceAnswer:
    scope_id, base_model = price.scope_id or None, price.base_model or None
    return PriceAnswer.of_record(price, scope_id=scope_id, base_model=base_model)
