"""Sharing and pins: which tenants may use an adapter, and whether it is kept on the device."""

from typing import Literal

from pydantic import Field
from sqlalchemy import Connection

from registry.catalog import grants, offers, pins
from registry.catalog.adapter_rows import Adapter
from registry.catalog.grants import Grant
from registry.catalog.offers import Offer
from registry.errors import Invalid
from server.accounts import tenants
from server.api.adapter_view import PinAnswer, pin_view
from server.api.answer import Answer, ListAnswer
from server.api.deps import tenants_router
from server.api.endpoints.adapters import ReaderDep, WriterDep
from server.billing.prices import price_of_adapter
from server.database.clock import now_ms

router = tenants_router("/adapters/{name}")


class GrantAnswer(Answer):
    """A tenant that an adapter is shared with, or a name or id that it is offered to.

    tenant: of a pending offer, as you wrote it.   tenant_id, granted_at: null until the tenant
    accepts.   expires_at: of a pending offer. Times are in Unix seconds.
    """

    object: Literal["adapter.grant"] = "adapter.grant"
    adapter: str = Field(examples=["my-adapter"])
    tenant: str = Field(examples=["acme"])
    tenant_id: str | None = Field(examples=["ten_8c1f0a6b3e5d7942"])
    status: Literal["offered", "accepted"]
    granted_at: int | None = Field(examples=[1_798_761_600])
    expires_at: int | None = Field(examples=[None])


class GrantList(ListAnswer[GrantAnswer]):
    """All tenants that an adapter is shared with, then all names and ids that it is offered to."""


class GrantRevoked(Answer):
    """The answer to the end of a grant or an offer."""

    object: Literal["adapter.grant.revoked"] = "adapter.grant.revoked"
    adapter: str = Field(examples=["my-adapter"])
    tenant: str = Field(examples=["acme"])
    revoked: Literal[True] = True


class AdapterPin(PinAnswer):
    """The answer to the pinning of an adapter."""

    id: str = Field(examples=["my-adapter"])
    object: Literal["adapter.pin"] = "adapter.pin"


class PinRemoved(Answer):
    """The answer to the removal of a pin."""

    id: str = Field(examples=["my-adapter"])
    object: Literal["adapter.pin.removed"] = "adapter.pin.removed"
    removed: Literal[True] = True


@router.get("/grants")
async def list_grants(name: str, reader: ReaderDep) -> GrantList:
    """List the tenants that an adapter is shared with or offered to."""

    def read(conn: Connection) -> GrantList:
        adapter = reader.find(conn, name)
        accepted = [_accepted(name, *found) for found in _shared_with(conn, adapter)]
        offered = [_offered(name, made) for made in offers.list_made(conn, adapter, now_ms())]
        return GrantList(data=accepted + offered)

    return await reader.database.read(read)


@router.put("/grants/{tenant}")
async def grant(name: str, tenant: str, writer: WriterDep) -> GrantAnswer:
    """Offer an adapter to another tenant, given by name or id; the answer is the same for any."""
    identity = writer.identity

    def write(conn: Connection) -> GrantAnswer:
        adapter = writer.lock(conn, name)
        if tenant in (identity.tenant_id, identity.tenant_name):
            raise Invalid("An adapter cannot be shared with its owner.", param="tenant")
        for earlier, grantee in _shared_with(conn, adapter, tenant):
            return _accepted(name, earlier, grantee)
        made = offers.offer(conn, adapter, tenant, actor=identity.actor, now_ms=now_ms())
        return _offered(name, made)

    return await writer.database.write(write)


@router.delete("/grants/{tenant}")
async def revoke(name: str, tenant: str, writer: WriterDep) -> GrantRevoked:
    """Stop sharing an adapter with a tenant, or withdraw the offer that was made to this text.

    This succeeds also if there was neither.
    """

    def write(conn: Connection) -> None:
        adapter = writer.lock(conn, name)
        actor, at_ms = writer.identity.actor, now_ms()
        offers.withdraw(conn, adapter, tenant, actor=actor, now_ms=at_ms)
        for found, _ in _shared_with(conn, adapter, tenant):
            grants.revoke(conn, adapter, found.grantee_id, actor=actor, now_ms=at_ms)

    await writer.database.write(write)
    return GrantRevoked(adapter=name, tenant=tenant)


@router.put("/pin")
async def pin(name: str, writer: WriterDep) -> AdapterPin:
    """Keep the version that `latest` points to on the device, also when `latest` moves."""
    identity = writer.identity

    def write(conn: Connection) -> AdapterPin:
        adapter = writer.lock(conn, name)
        made = pins.pin_adapter(conn, adapter, actor=identity.actor, now_ms=now_ms())
        price = price_of_adapter(conn, now_ms(), identity.tenant_id, adapter.adapter_id)
        return AdapterPin(id=name, **dict(pin_view(made, price)))

    return await writer.database.write(write)


@router.delete("/pin")
async def unpin(name: str, writer: WriterDep) -> PinRemoved:
    """Remove an adapter's pin; this succeeds also if it was not pinned."""

    def write(conn: Connection) -> None:
        adapter = writer.lock(conn, name)
        pins.unpin_adapter(conn, adapter, actor=writer.identity.actor, now_ms=now_ms())

    await writer.database.write(write)
    return PinRemoved(id=name)


def _shared_with(
    conn: Connection, adapter: Adapter, tenant: str | None = None
) -> list[tuple[Grant, str]]:
    """Grants of the adapter with the grantees' names. tenant: only those to this name or id.

    Only tenants that accepted are looked up, so that no answer says whether there are others.
    """
    found = grants.list_grants(conn, adapter)
    names = tenants.names_of(conn, [grant.grantee_id for grant in found])
    named = [(grant, names[grant.grantee_id]) for grant in found]
    return [pair for pair in named if tenant in (None, pair[0].grantee_id, pair[1])]


def _accepted(name: str, grant: Grant, grantee: str) -> GrantAnswer:
    shown = {"tenant": grantee, "tenant_id": grant.grantee_id}
    return GrantAnswer.of_record(grant, adapter=name, status="accepted", expires_at=None, **shown)


def _offered(name: str, made: Offer) -> GrantAnswer:
    shown = {"tenant": made.addressee, "tenant_id": None, "granted_at": None}
    return GrantAnswer.of_record(made, adapter=name, status="offered", **shown)
