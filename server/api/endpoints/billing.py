"""Balances, and what operators post by hand: credits, payments, corrections."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Header
from pydantic import Field
from sqlalchemy import Connection

from registry.errors import Invalid
from server.accounts import tenants
from server.accounts.auth import USAGE_READ
from server.api.accounts import AccountDep, AccountEndpoints, RowsDep
from server.api.answer import Answer
from server.api.bodies import BodyFields, json_body
from server.api.deps import DatabaseDep, SignerDep
from server.api.endpoints.budgets import Dollars, nanousd
from server.api.receipt_models import LedgerEntry
from server.billing import budgets, credits
from server.billing.credits import CreditKind
from server.billing.rating import format_usd
from server.billing.receipts.receipt import Receipt
from server.database.clock import now_ms

both = AccountEndpoints()

MAX_AMOUNT_NANOUSD = 10**15
"""A million dollars, the most of one entry: nine thousand such entries still fit a balance."""

# PostgreSQL stores no zero bytes.
_Memo = Annotated[str | None, Field(max_length=512, pattern=r"^[^\x00]*$")]
IdempotencyKey = Annotated[
    str, Header(alias="Idempotency-Key", min_length=1, max_length=128, pattern=r"^[!-~]+$")
]


class _PostedAmount(BodyFields):
    """An amount; exactly one of amount_usd and amount_nanousd is given.

    amount_usd: dollars in digits, such as 12.5, with nine decimals at most.
    amount_nanousd: nano-dollars, of which a dollar has 10^9.
    memo: what the entry and its receipt say; null for nothing.
    """

    amount_usd: Dollars | None = None
    amount_nanousd: int | None = None
    memo: _Memo = None


class _Correction(BodyFields):
    """A correction. entry_id: the ledger entry that it reverses.

    memo: what the entry and its receipt say; null for nothing.
    """

    entry_id: int = Field(ge=1, lt=2**63)
    memo: _Memo = None


class BalanceAnswer(Answer):
    """A balance. Each amount is in nano-dollars, and the same in dollars.

    balance: by the ledger; negative is owed.   held: what requests under way hold.
    available: the balance without what is held.
    """

    object: Literal["balance"] = "balance"
    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    tenant: str = Field(examples=["acme"])
    balance_nanousd: int = Field(examples=[12_250_120_000])
    balance_usd: str = Field(examples=["12.250120000"])
    held_nanousd: int = Field(examples=[120_000])
    held_usd: str = Field(examples=["0.000120000"])
    available_nanousd: int = Field(examples=[12_250_000_000])
    available_usd: str = Field(examples=["12.250000000"])


@dataclass(frozen=True, slots=True)
class _Posting:
    """An amount that the operator posts to a tenant's account."""

    rows: RowsDep
    body: Annotated[_PostedAmount, json_body(_PostedAmount)]
    signer: SignerDep
    idempotency_key: IdempotencyKey

    async def post(self, kind: CreditKind) -> LedgerEntry:
        amount_nanousd = _amount_nanousd(self.body)

        def write(conn: Connection, tenant_id: str) -> Receipt:
            return credits.post_credit(
                conn,
                self.signer,
                kind,
                tenant_id,
                amount_nanousd,
                memo=self.body.memo,
                idempotency_key=self.idempotency_key,
                now_ms=now_ms(),
            )

        return LedgerEntry.model_validate(await self.rows.write(write))


@both("GET", "/balance", USAGE_READ, name="get_balance_of")
async def get_balance(account: AccountDep, database: DatabaseDep) -> BalanceAnswer:
    """Get the tenant's balance, and how much of it is held for requests under way."""

    def read(conn: Connection) -> BalanceAnswer:
        found = tenants.get_tenant(conn, account.tenant)
        sums = budgets.read_sums(conn, found.tenant_id, now_ms())
        return BalanceAnswer.of_record(sums, tenant_id=found.tenant_id, tenant=found.name)

    return await database.read(read)


@both.operators("POST", "/credits", status_code=201)
async def add_credit(posting: Annotated[_Posting, Depends()]) -> LedgerEntry:
    """Give a tenant a credit."""
    return await posting.post("credit")


@both.operators("POST", "/payments", status_code=201)
async def add_payment(posting: Annotated[_Posting, Depends()]) -> LedgerEntry:
    """Record a payment of a tenant, made before or after it used anything."""
    return await posting.post("payment")


@both.admin_router.post("/corrections", status_code=201)
async def add_correction(
    body: Annotated[_Correction, json_body(_Correction)],
    database: DatabaseDep,
    signer: SignerDep,
    idempotency_key: IdempotencyKey,
) -> LedgerEntry:
    """Reverse a ledger entry by an entry of its own; an entry can be reversed once."""

    def write(conn: Connection) -> Receipt:
        return credits.post_correction(
            conn,
            signer,
            body.entry_id,
            memo=body.memo,
            idempotency_key=idempotency_key,
            now_ms=now_ms(),
        )

    return LedgerEntry.model_validate(await database.write(write))


def _amount_nanousd(body: _PostedAmount) -> int:
    """The amount. Raises Invalid unless exactly one of the fields has it, within the limit."""
    if (body.amount_usd is None) == (body.amount_nanousd is None):
        raise Invalid("Give either amount_usd or amount_nanousd.", param="amount_usd")
    if body.amount_usd is None:
        param, amount = "amount_nanousd", body.amount_nanousd or 0
    else:
        param, amount = "amount_usd", nanousd(body.amount_usd)
    if not 0 < amount <= MAX_AMOUNT_NANOUSD:
        limit = format_usd(MAX_AMOUNT_NANOUSD)
        raise Invalid(f"An amount is more than 0 and at most {limit} dollars.", param=param)
    return amount
