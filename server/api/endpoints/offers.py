"""Offers to the caller's tenant: adapters of other tenants that it may accept or decline."""

from collections.abc import Callable
from typing import Literal

from pydantic import Field
from sqlalchemy import Connection

from registry.base.base_models import BaseModels
from registry.catalog import received_offers
from registry.catalog.names import is_name
from registry.catalog.received_offers import Addressee, ReceivedOffer, offer_not_found
from server.accounts import tenants
from server.accounts.auth import Identity
from server.api.answer import Answer, ListAnswer
from server.api.deps import tenants_router
from server.api.endpoints.adapters import AdapterWriter, ReaderDep, WriterDep
from server.billing.prices import Price, prices_for
from server.database.clock import now_ms

router = tenants_router("/offers")


class OfferAnswer(Answer):
    """An adapter that another tenant offers to you, or that you accepted.

    model: what requests name once you accept.   rank, size_bytes: of its latest version.
    is_servable: whether that version is for a base model that is served.   prompt_nanousd,
    completion_nanousd: your price of a token.   offered_at, expires_at: null once accepted;
    granted_at: null until then. Times are in Unix seconds.
    """

    object: Literal["adapter.offer"] = "adapter.offer"
    model: str = Field(examples=["acme/support"])
    owner: str = Field(examples=["acme"])
    name: str = Field(examples=["support"])
    status: Literal["offered", "accepted"]
    offered_at: int | None = Field(examples=[1_798_761_600])
    expires_at: int | None = Field(examples=[1_801_353_600])
    granted_at: int | None = Field(examples=[None])
    rank: int | None = Field(examples=[16])
    size_bytes: int | None = Field(examples=[8_716_288])
    is_servable: bool
    prompt_nanousd: int = Field(examples=[150])
    completion_nanousd: int = Field(examples=[600])


class OfferList(ListAnswer[OfferAnswer]):
    """Pending offers, at most ten of one owner, then the accepted ones.

    has_more: whether more offers are pending; they appear as these are answered.
    """


class OfferAccepted(Answer):
    """The answer to the acceptance of an offer."""

    object: Literal["adapter.offer.accepted"] = "adapter.offer.accepted"
    model: str = Field(examples=["acme/support"])
    accepted: Literal[True] = True


class OfferDeclined(Answer):
    """The answer to a declined offer, and to an accepted one that is given back."""

    object: Literal["adapter.offer.declined"] = "adapter.offer.declined"
    model: str = Field(examples=["acme/support"])
    declined: Literal[True] = True


@router.get("")
async def list_offers(reader: ReaderDep) -> OfferList:
    """List the adapters that other tenants offer to you, and those that you accepted."""

    def read(conn: Connection) -> OfferList:
        to, at_ms = _addressee(conn, reader.identity), now_ms()
        pending, has_more = received_offers.list_pending(conn, to, at_ms)
        found = pending + received_offers.list_accepted(conn, to.tenant_id)
        owners = tenants.names_of(conn, {offer.owner_id for offer in found})
        ids = {offer.adapter_id for offer in found}
        prices = prices_for(conn, at_ms, tenant_id=to.tenant_id, adapter_ids=ids)
        bases = reader.view.bases.models
        data = [
            _offer(offer, owners[offer.owner_id], prices[offer.adapter_id], bases)
            for offer in found
        ]
        return OfferList(data=data, has_more=has_more)

    return await reader.database.read(read)


@router.put("/{owner}/{adapter}")
async def accept_offer(owner: str, adapter: str, writer: WriterDep) -> OfferAccepted:
    """Accept an offer, so that requests may name the adapter as `owner/name`, at your cost."""
    return OfferAccepted(model=await _decide(writer, owner, adapter, received_offers.accept))


@router.delete("/{owner}/{adapter}")
async def decline_offer(owner: str, adapter: str, writer: WriterDep) -> OfferDeclined:
    """Decline an offer, which its owner is not told, or give back an adapter that you accepted."""
    return OfferDeclined(model=await _decide(writer, owner, adapter, received_offers.decline))


async def _decide(
    writer: AdapterWriter, owner: str, adapter: str, decide: Callable[..., None]
) -> str:
    """Accept or decline an offer; the name that requests have for the adapter."""
    identity = writer.identity

    def write(conn: Connection) -> None:
        to, owner_id = _addressee(conn, identity), _owner_id(conn, owner, adapter)
        decide(conn, to, owner_id, adapter, actor=identity.actor, now_ms=now_ms())

    await writer.database.write(write)
    return f"{owner}/{adapter}"


def _addressee(conn: Connection, identity: Identity) -> Addressee:
    tenant = tenants.get_tenant(conn, identity.tenant_id)
    return Addressee(tenant.tenant_id, tenants.addresses_of(tenant), tenant.created_at_ms)


def _owner_id(conn: Connection, owner: str, adapter: str) -> str:
    """Id of the owner, or "", which has no offers. Raises NotFound for a malformed name."""
    if not (is_name(owner) and is_name(adapter)):
        raise offer_not_found()
    return tenants.find_id(conn, owner) or ""


def _offer(offer: ReceivedOffer, owner: str, price: Price, bases: BaseModels) -> OfferAnswer:
    is_accepted = offer.granted_at_ms is not None
    return OfferAnswer.of_record(
        offer,
        model=f"{owner}/{offer.name}",
        owner=owner,
        status="accepted" if is_accepted else "offered",
        is_servable=offer.base is not None and bases.serving(offer.base) is not None,
        prompt_nanousd=price.prompt_nanousd,
        completion_nanousd=price.completion_nanousd,
    )
