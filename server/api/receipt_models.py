"""Receipts and statements, as routes answer them and `chorale receipts verify` reads them."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from server.api.answer import Answer, ListAnswer
from server.billing.receipts.receipt import EntryKind
from server.billing.statement_figures import SCHEMA
from server.text.json_object import JsonObject

Sha256 = Annotated[str, Field(examples=["3c" * 32])]
KeyId = Annotated[str, Field(examples=["f1d3a5964e0b20c7"])]
"""The id of a key that signs receipts and statements."""
Signature = Annotated[str, Field(examples=["mYtK" * 21 + "Zw=="])]


class SignedReceipt(Answer):
    """An entry of the ledger with all that it was made of; null where a field has no meaning.

    amount_nanousd, amount_usd: what the tenant is charged, negative where it is given something.
    prompt_nanousd, cached_nanousd, completion_nanousd: of a token.   prompt_tokens: all of the
    prompt's tokens, the cached ones too.   hold_nanousd: what was held for the request.
    kept_nanousd: of a GB (10^9 bytes) for an hour in `tier`.
    is_failed: whether the answer was an error for which nothing was billed.
    period: the month whose statement the entry is on.
    receipt_seq: the number of the tenant's receipt, whose sha256 is prev_sha256 in the next one.
    signature: of sha256, Ed25519 in base64.
    """

    entry_id: int = Field(examples=[4711])
    kind: EntryKind = Field(examples=["usage"])
    request_id: str | None = Field(examples=["0f6e2b7c9d1a4e538b20c7f1d3a5964e"])
    tenant_id: str = Field(examples=["ten_5f0c1d2e3a4b5968"])
    tenant_name: str | None = Field(examples=["acme"])
    key_id: str | None = Field(examples=["8sKq2WvB4xLn"])
    model: str | None = Field(examples=["acme/support"])
    adapter_id: str | None = Field(examples=["ad_0f6e2b7c9d1a4e538b20c7f1d3a5964e"])
    adapter_version: int | None = Field(examples=[3])
    adapter_digest: Sha256 | None
    base_revision: Sha256 | None
    prompt_tokens: int | None = Field(examples=[412])
    cached_tokens: int | None = Field(examples=[256])
    completion_tokens: int | None = Field(examples=[96])
    finish_reason: str | None = Field(examples=["stop"])
    stop_cause: str | None = Field(examples=["eos"])
    is_failed: bool | None
    output_sha256: Sha256 | None
    tier: str | None = Field(examples=[None])
    size_bytes: int | None = Field(examples=[None])
    slabs: int | None = Field(examples=[None])
    duration_ms: int | None = Field(examples=[None])
    price_version: int | None = Field(examples=[4])
    prompt_nanousd: int | None = Field(examples=[150])
    cached_nanousd: int | None = Field(examples=[75])
    completion_nanousd: int | None = Field(examples=[600])
    kept_nanousd: int | None = Field(examples=[None])
    hold_nanousd: int | None = Field(examples=[196_200])
    amount_nanousd: int = Field(examples=[100_200])
    amount_usd: str = Field(examples=["0.000100200"])
    debit_account: str = Field(examples=["tenant/ten_5f0c1d2e3a4b5968"])
    credit_account: str = Field(examples=["revenue/usage"])
    reverses_entry_id: int | None = Field(examples=[None])
    memo: str | None = Field(examples=[None])
    period: str = Field(examples=["2026-11"])
    started_at: str | None = Field(examples=["2026-11-02T09:14:05.120Z"])
    first_token_at: str | None = Field(examples=["2026-11-02T09:14:05.348Z"])
    ended_at: str = Field(examples=["2026-11-02T09:14:07.016Z"])
    posted_at: str = Field(examples=["2026-11-02T09:14:07.402Z"])
    engine_id: str | None = Field(examples=["engine-1"])
    journal_seq: int | None = Field(examples=[18_230])
    receipt_seq: int = Field(examples=[1206])
    prev_sha256: Sha256
    signing_key: KeyId
    sha256: Sha256
    signature: Signature


_CREDIT: JsonObject = {
    "object": "entry", "entry_id": 4712, "kind": "credit", "tenant_id": "ten_5f0c1d2e3a4b5968",
    "tenant_name": "acme", "amount_nanousd": -25_000_000_000, "amount_usd": "-25.000000000",
    "debit_account": "expense/credit", "credit_account": "tenant/ten_5f0c1d2e3a4b5968",
    "memo": "for the outage of Monday", "period": "2026-11",
    "ended_at": "2026-11-04T10:00:00.000Z", "posted_at": "2026-11-04T10:00:00.000Z",
    "receipt_seq": 1207, "prev_sha256": "3c" * 32, "sha256": "3c" * 32,
    "signing_key": "f1d3a5964e0b20c7", "signature": "mYtK" * 21 + "Zw==",
}  # fmt: skip


def _show_a_credit(schema: JsonObject) -> None:
    """Replace the examples of a charge by those of a credit."""
    for name, field in schema["properties"].items():
        field["examples"] = [_CREDIT.get(name)]


class LedgerEntry(SignedReceipt):
    """An entry that the operator posted, as its receipt says it."""

    model_config = ConfigDict(json_schema_extra=_show_a_credit)

    object: Literal["entry"] = "entry"
    kind: Literal["credit", "payment", "correction", "reversal", "difference"]


class ReceiptAnswer(Answer):
    """A receipt, with those that reverse it.   verified_with: the key that signed it.

    parent_id: the id of the request for a route that this one is an attempt of, else null.
    """

    object: Literal["receipt"] = "receipt"
    parent_id: str | None = Field(examples=[None])
    receipt: SignedReceipt
    corrections: list[SignedReceipt]
    verified_with: KeyId


class ReceiptList(ListAnswer[ReceiptAnswer]):
    """The receipts of all attempts of a request."""


_DOCUMENT: JsonObject = {
    "schema": SCHEMA, "tenant_id": "ten_5f0c1d2e3a4b5968", "tenant_name": "acme",
    "period": "2026-11", "issued_at": "2026-12-01T01:30:00.000Z", "currency": "USD",
    "legal_name": "Acme Ltd.", "address": "1 Main Street, Springfield",
    "adapter_names": {"ad_0f6e2b7c9d1a4e538b20c7f1d3a5964e": "support"},
    "opening_balance_nanousd": 0, "num_entries": 1,
    "total_nanousd": 119_400, "spent_nanousd": 119_400,
    "closing_balance_nanousd": 119_400, "first_receipt_seq": 1206, "last_receipt_seq": 1206,
    "receipts_sha256": "3c" * 32, "signing_key": "f1d3a5964e0b20c7",
    "prompt_tokens": 412, "cached_tokens": 0, "completion_tokens": 96,
    "totals": {"usage": {"num_entries": 1, "amount_nanousd": 119_400}},
    "lines": [
        {
            "kind": "usage", "model": "acme/support", "price_version": 4,
            "adapter_id": "ad_0f6e2b7c9d1a4e538b20c7f1d3a5964e", "meter": meter,
            "unit_nanousd": unit, "quantity": str(tokens), "amount_nanousd": unit * tokens,
        }
        for meter, unit, tokens in (("completion_tokens", 600, 96), ("prompt_tokens", 150, 412))
    ],
    "payments": [],
}  # fmt: skip


class IssuedStatement(Answer):
    """A statement as it was signed. sha256: of its canonical JSON.   signature: of sha256.

    statement: the document, whose `schema` names its fields.
    """

    object: Literal["statement"] = "statement"
    status: Literal["issued"] = "issued"
    statement: dict[str, JsonValue] = Field(examples=[_DOCUMENT])
    sha256: Sha256
    signature: Signature
