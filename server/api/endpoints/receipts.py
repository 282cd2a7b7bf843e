"""Receipts of a tenant's charges, and the public keys that verify them."""

import re
from collections.abc import Sequence
from typing import Any, Literal

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic import Field
from sqlalchemy.engine import Connection

from registry.errors import Fault, NotFound
from server.api.answer import Answer, ListAnswer
from server.api.deps import DatabaseDep, UsageKey, tenants_router
from server.api.receipt_models import KeyId, ReceiptAnswer, ReceiptList, SignedReceipt
from server.billing.receipts.rows import sealed_receipt, select_receipts
from server.billing.receipts.signing_keys import list_keys
from server.billing.tables import IS_OPEN, entries, holds, usage_events
from server.inference.attempts import attempt_ids, parent_of

router = tenants_router()
public_router = APIRouter(prefix="/v1")

_SHOWN_ID = re.compile(r"(?:chatcmpl-|cmpl-|req_)(.+)")
_ENTRY_ID = re.compile(r"entry_([1-9][0-9]{0,17})")
_RETRY_AFTER_S = 1.0


class ReceiptKey(Answer):
    """A public key. public_key: 32 bytes in hex.   created_at: Unix seconds."""

    object: Literal["receipt_key"] = "receipt_key"
    key_id: KeyId
    algorithm: Literal["ed25519"] = "ed25519"
    public_key: str = Field(examples=["5d" * 32])
    created_at: int = Field(examples=[1_794_787_200])


class ReceiptKeyList(ListAnswer[ReceiptKey]):
    """The public keys that verify receipts, the newest first."""


@public_router.get("/receipts/keys")
async def get_keys(database: DatabaseDep) -> ReceiptKeyList:
    """List the public keys that verify receipts, newest first.

    No API key is needed: a bill can be verified without an account.
    """
    keys = await database.read(list_keys)
    data = [
        ReceiptKey.of_record(key, key_id=key.public.key_id, public_key=key.public.raw.hex())
        for key in keys
    ]
    return ReceiptKeyList(data=data)


# The scope is usage, not inference: receipts say prices, and entries can be asked for by number.
@router.get("/receipts/{request_id}")
async def get_receipt(request_id: str, database: DatabaseDep, identity: UsageKey) -> ReceiptAnswer:
    """Get the receipt of a request or of a ledger entry, with the receipts that correct it.

    request_id: the request's id, its answer's `x-request-id` (`req_...`) or `id` (`chatcmpl-...`,
    `cmpl-...`), or `entry_<number>`. A request for a route has the receipt of its last attempt that
    did not fail.
    """
    found = await database.read(lambda conn: _find(conn, identity.tenant_id, request_id))
    if found is None:
        raise _not_found()
    return found


@router.get("/receipts/{request_id}/attempts")
async def get_attempts(request_id: str, database: DatabaseDep, identity: UsageKey) -> ReceiptList:
    """List the receipts of all attempts of a request for a route, in order; of another request, its
    own.

    request_id: the id of the request, of one of its attempts, or of its answer.
    """
    given = _request_id(request_id)
    parent_id = parent_of(given) or given

    def read(conn: Connection) -> list[ReceiptAnswer]:
        request_ids = [parent_id, *attempt_ids(parent_id)]
        _refuse_pending(conn, identity.tenant_id, request_ids)
        query = select_receipts().where(entries.c.tenant_id == identity.tenant_id)
        found = query.where(usage_events.c.request_id.in_(request_ids), entries.c.kind == "usage")
        rows = conn.execute(found.order_by(usage_events.c.request_id)).mappings().all()
        return [_answer(conn, query, row) for row in rows]

    data = await database.read(read)
    if not data:
        raise _not_found()
    return ReceiptList(data=data)


def _find(conn: Connection, tenant_id: str, given_id: str) -> ReceiptAnswer | None:
    """The tenant's receipt, None if there is none. Raises Invalid while its request is not
    settled.
    """
    query = select_receipts().where(entries.c.tenant_id == tenant_id)
    if (match := _ENTRY_ID.fullmatch(given_id)) is not None:
        found = query.where(entries.c.entry_id == int(match[1]))
    else:
        event, request_id = usage_events.c, _request_id(given_id)
        request_ids = [request_id, *attempt_ids(request_id)]
        _refuse_pending(conn, tenant_id, request_ids)
        found = query.where(event.request_id.in_(request_ids))
        has_failed = event.is_failed | (event.finish_reason == "error")
        found = found.order_by(has_failed, event.request_id.desc())
    row = conn.execute(found).mappings().first()
    return None if row is None else _answer(conn, query, row)


def _answer(conn: Connection, query: sa.Select[Any], row: sa.RowMapping) -> ReceiptAnswer:
    """A receipt and its corrections.   query: of all receipts of the tenant."""
    reversing = query.where(entries.c.reverses_entry_id == row["entry_id"])
    corrections = conn.execute(reversing).mappings().all()
    receipt = _receipt(row)
    return ReceiptAnswer(
        parent_id=parent_of(receipt.request_id or ""),
        receipt=receipt,
        corrections=[_receipt(entry) for entry in corrections],
        verified_with=receipt.signing_key,
    )


def _receipt(row: sa.RowMapping) -> SignedReceipt:
    return SignedReceipt.model_validate(sealed_receipt(dict(row)))


def _request_id(given_id: str) -> str:
    match = _SHOWN_ID.fullmatch(given_id)
    return match[1] if match else given_id


def _not_found() -> Fault:
    message = "You have no receipt of this id: nothing was billed for it."
    return NotFound(message, code="receipt_not_found")


def _refuse_pending(conn: Connection, tenant_id: str, request_ids: Sequence[str]) -> None:
    query = sa.select(holds.c.request_id).where(
        holds.c.request_id.in_(request_ids),
        holds.c.tenant_id == tenant_id,
        IS_OPEN,
    )
    if conn.execute(query).first():
        message = "This request is not settled yet; ask for its receipt again when it has ended."
        raise NotFound(message, code="receipt_pending", retry_after_s=_RETRY_AFTER_S)
