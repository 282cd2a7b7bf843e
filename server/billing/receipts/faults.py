"""Finds errors in one receipt by itself: in its types, its seal, its accounts, its amount.

The checks need no database, only the receipt and the public keys.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping

from server.billing.rating import TokenPrices, format_usd, kept_amount, rate
from server.billing.receipts.receipt import (
    CHARGES,
    SEAL,
    TYPES,
    UNDOING,
    Receipt,
    int_of,
    tenant_account,
)
from server.billing.receipts.signing import PublicKey

COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")

_KINDS = (*CHARGES, *UNDOING, "credit", "payment", "difference")
_ALWAYS = (
    "entry_id", "kind", "tenant_id", "amount_nanousd", "amount_usd", "debit_account",
    "credit_account", "period", "ended_at", "posted_at", "receipt_seq", "prev_sha256",
    "signing_key", *SEAL,
)  # fmt: skip
_OF_USAGE = ("request_id", *COUNTS, "finish_reason", "stop_cause", "is_failed", "journal_seq")
_OF_KEPT = ("tier", "size_bytes", "slabs", "duration_ms")

Fault = tuple[str | None, str]
"""(field, message): the wrong field, or None if it is unknown, and a sentence about the error."""


def receipt_faults(
    receipt: Receipt, computed: str, keys: Mapping[str, PublicKey]
) -> Iterator[Fault]:
    """Yield the errors of a receipt whose fields have the right types (see `type_faults`).

    computed: the hash of the receipt.   keys: public keys by key id.
    """
    yield from _seal_faults(receipt, computed, keys)
    yield from _account_faults(receipt)
    yield from _amount_faults(receipt)


def reversal_faults(receipt: Receipt, correction: Receipt) -> Iterator[Fault]:
    """Yield an error for each field in which a correction does not reverse the receipt."""
    if correction["reverses_entry_id"] != receipt["entry_id"]:
        yield "reverses_entry_id", f"it does not reverse entry {receipt['entry_id']}"
    if int_of(correction, "amount_nanousd") != -int_of(receipt, "amount_nanousd"):
        yield "amount_nanousd", f"it does not undo {receipt['amount_nanousd']}"
    accounts = (correction["credit_account"], correction["debit_account"])
    if accounts != (receipt["debit_account"], receipt["credit_account"]):
        yield "debit_account", "its accounts are not those of the reversed entry, exchanged"


def type_faults(receipt: Receipt) -> Iterator[Fault]:
    """Yield an error for each field that lacks a value or has one of another type."""
    for name, expected in TYPES.items():
        value = receipt.get(name)
        if value is not None and type(value) is not expected:
            yield name, f"it is {value!r:.80}, no {expected.__name__}"
    needed: tuple[str, ...] = _ALWAYS
    if receipt.get("kind") == "usage":
        needed += _OF_USAGE
    elif receipt.get("kind") in CHARGES:
        needed += _OF_KEPT
    for name in needed:
        if receipt.get(name) is None:
            yield name, "it is missing"
    if receipt.get("kind") not in _KINDS:
        yield "kind", f"there is no kind {receipt.get('kind')!r:.80}"


def _seal_faults(receipt: Receipt, computed: str, keys: Mapping[str, PublicKey]) -> Iterator[Fault]:
    stated, signature = str(receipt["sha256"]), str(receipt["signature"])
    faults = list(signature_faults(receipt["signing_key"], stated, signature, keys))
    if stated == computed:
        yield from faults
    elif not faults:
        yield None, "a field was changed after it was signed: its hash is another"
    elif not list(signature_faults(receipt["signing_key"], computed, signature, keys)):
        yield "sha256", "it was changed: the receipt and its signature fit another hash"
    else:
        yield None, "hash and signature do not fit: a field and its hash, or its key, were changed"


def signature_faults(
    key_id: object, sha256: object, signature: object, keys: Mapping[str, PublicKey]
) -> Iterator[Fault]:
    """Yield an error unless the key of that id signed that hash."""
    if (key := keys.get(str(key_id))) is None:
        yield "signing_key", f"the key {key_id!s:.80} is not among those that were given"
    elif not _is_canonical_base64(str(signature)):
        yield "signature", "it is not base64, or it was changed"
    elif not key.is_signed(str(sha256), str(signature)):
        yield "signature", "the key did not make it for this hash"


def _is_canonical_base64(text: str) -> bool:
    # Some bits of the last digit are unused: another digit there would decode to the same bytes.
    try:
        return base64.b64encode(base64.b64decode(text, validate=True)).decode() == text
    except (binascii.Error, ValueError):
        return False


def _account_faults(receipt: Receipt) -> Iterator[Fault]:
    kind, amount = str(receipt["kind"]), int_of(receipt, "amount_nanousd")
    own = tenant_account(str(receipt["tenant_id"]))
    debit, credit = receipt["debit_account"], receipt["credit_account"]
    is_revenue = str(credit if debit == own else debit).startswith("revenue/")
    if (debit == own) == (credit == own):
        yield "debit_account", "exactly one of the two accounts must be the tenant's own"
    elif amount and (amount > 0) != (debit == own):
        yield "amount_nanousd", "it must be positive if the tenant is debited, else negative"
    elif kind in CHARGES and (debit, credit) != (own, f"revenue/{kind}"):
        yield "credit_account", f"{kind} must be owed by the tenant to revenue/{kind}"
    elif kind in ("credit", "payment") and credit != own:
        yield "credit_account", f"a {kind} must go to the tenant"
    elif kind in UNDOING and (credit == own, is_revenue) != (kind == "correction",) * 2:
        yield "debit_account", "a correction must undo a charge, a reversal a credit or a payment"
    if (kind in UNDOING) != (receipt["reverses_entry_id"] is not None):
        yield (
            "reverses_entry_id",
            "a correction or reversal must name the entry that it reverses, and no other kind may",
        )
    if str(receipt["period"]) < str(receipt["ended_at"])[:7]:
        yield "period", f"the entry ended after this month, at {receipt['ended_at']}"


def _amount_faults(receipt: Receipt) -> Iterator[Fault]:
    amount = int_of(receipt, "amount_nanousd")
    if receipt["amount_usd"] != format_usd(amount):
        usd = receipt["amount_usd"]
        yield "amount_usd", f"it is {usd}; {amount} nano-dollars are {format_usd(amount)}"
    if receipt["kind"] == "usage":
        if not 0 <= int_of(receipt, "cached_tokens") <= int_of(receipt, "prompt_tokens"):
            yield "cached_tokens", "they are part of the prompt's tokens, and cannot be more"
        expected = rate(receipt, TokenPrices.of(receipt)).total
    elif receipt["kind"] in CHARGES:
        expected = kept_amount(
            int_of(receipt, "size_bytes"),
            int_of(receipt, "duration_ms"),
            int_of(receipt, "kept_nanousd"),
        )
    else:
        return
    if amount != expected:
        yield "amount_nanousd", f"it is {amount}; its counts and prices make {expected}"
