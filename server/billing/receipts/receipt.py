"""A receipt: one entry of the ledger with its event and prices, hash-chained and signed.

The fields of a receipt are the columns of every export, so that each row can be checked by itself.
This module has its fields, canonical form and hash, and needs no database.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Literal

Value = int | str | bool | None
Receipt = Mapping[str, Value]
"""Values by the names of FIELDS, `sha256` and `signature`; None where a field has no meaning."""

GENESIS = "0" * 64
"""The `prev_sha256` of a tenant's first receipt."""

SCHEMA = "chorale.receipt/1"

EntryKind = Literal[
    "usage", "storage", "pinned", "resident",
    "correction", "credit", "payment", "reversal", "difference",
]  # fmt: skip
CHARGES = ("usage", "storage", "pinned", "resident")
UNDOING = ("correction", "reversal")
SPEND_KINDS = (*CHARGES, "correction")
"""The kinds of entries whose amounts add up to what is spent: charges, and corrections, which take
charges back. Credits, payments and their reversals are no spend.
"""


def _fields(type: type, names: str) -> dict[str, type]:
    return dict.fromkeys(names.split(), type)


# The order is that of an export's columns. New fields are added at the end, before sha256.
FIELDS: dict[str, type] = {
    **_fields(int, "entry_id"),
    **_fields(str, "kind request_id tenant_id tenant_name key_id model adapter_id"),
    **_fields(int, "adapter_version"),
    **_fields(str, "adapter_digest base_revision"),
    **_fields(int, "prompt_tokens cached_tokens completion_tokens"),
    **_fields(str, "finish_reason stop_cause"),
    **_fields(bool, "is_failed"),
    **_fields(str, "output_sha256 tier"),
    **_fields(int, "size_bytes slabs duration_ms price_version"),
    **_fields(int, "prompt_nanousd cached_nanousd completion_nanousd kept_nanousd"),
    **_fields(int, "hold_nanousd amount_nanousd"),
    **_fields(str, "amount_usd debit_account credit_account"),
    **_fields(int, "reverses_entry_id"),
    **_fields(str, "memo period started_at first_token_at ended_at posted_at engine_id"),
    **_fields(int, "journal_seq receipt_seq"),
    **_fields(str, "prev_sha256 signing_key"),
}
SEAL = ("sha256", "signature")
TYPES = FIELDS | dict.fromkeys(SEAL, str)
"""The types of the columns, by their names."""
COLUMNS = tuple(TYPES)

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def canonical(receipt: Receipt) -> bytes:
    """Return the bytes that are hashed: JSON of the fields with a value, sorted, no spaces, UTF-8.

    A field that is added later has no value in earlier receipts, so their hashes stay the same.
    """
    present: dict[str, Value] = {"schema": SCHEMA}
    for name in FIELDS:
        if (value := receipt[name]) is not None:
            present[name] = value
    return _encode(present).encode()


def sha256_of(receipt: Receipt) -> str:
    return hashlib.sha256(canonical(receipt)).hexdigest()


def tenant_account(tenant_id: str) -> str:
    return f"tenant/{tenant_id}"


def int_of(receipt: Receipt, name: str) -> int:
    """Return an integer field, 0 if it is None."""
    value = receipt[name]
    assert value is None or isinstance(value, int)
    return value or 0
