"""Receipts of every kind as a ledger would post them, without a database."""

import itertools
import random

from server.billing.rating import TokenPrices, kept_amount, rated_amounts
from server.billing.receipts.receipt import CHARGES, GENESIS, sha256_of
from server.billing.receipts.rows import KEPT_KINDS, NO_EVENT, receipt_of
from tests.server.factories import NOW_MS, SIGNER

PRICE = TokenPrices(prompt_nanousd=150, cached_nanousd=75, completion_nanousd=600)
KEPT_PRICE = 40_000_001
_ENDS = (
    ("stop", "eos"), ("length", "max_tokens"), ("length", "budget"), ("abort", "client"),
    ("error", "engine_failure"), ("error", "deadline"), ("abort", "gateway_lost"),
)  # fmt: skip
_numbers = itertools.count()
_NAMES = ("base", "pirate@3", '=1+1, "quoted"', "'it", "né 語", "two\nlines", "-7")


def make_row(kind, amount, tenant_id="ten_1", *, is_charge=True, **fields):
    """A row as `receipt_of` reads it, without the entry's place in the ledger."""
    own, other = f"tenant/{tenant_id}", f"revenue/{kind}"
    return NO_EVENT | {
        "kind": kind,
        "tenant_id": tenant_id,
        "tenant_name": "acme",
        "debit_account": own if is_charge else other,
        "credit_account": other if is_charge else own,
        "amount_nanousd": amount,
        "ended_at_ms": NOW_MS,
        "posted_at_ms": NOW_MS + 999,
        "period": "2026-02",
        "price_version": None,
        "reverses_entry_id": None,
        "memo": None,
        **fields,
    }


def make_usage(tenant_id="ten_1", prompt=7, cached=2, completion=5, **fields):
    event = {
        "request_id": f"r{next(_numbers)}", "key_id": "key1", "model": "base",
        "base_revision": "b" * 64, "prompt_tokens": prompt, "cached_tokens": cached,
        "completion_tokens": completion, "finish_reason": "stop", "stop_cause": "eos",
        "is_failed": False, "output_sha256": "0" * 64, "hold_nanousd": 10**6,
        "engine_id": "engine-1", "journal_seq": 4, "started_at_ms": NOW_MS - 2000,
        "first_token_at_ms": NOW_MS - 1000, "price_version": 1,
        "prompt_nanousd": 150, "cached_nanousd": 75, "completion_nanousd": 600,
    } | fields  # fmt: skip
    amounts = rated_amounts(
        event["finish_reason"], event["stop_cause"], prompt, cached, completion, PRICE,
        is_failed=event["is_failed"],
    )  # fmt: skip
    return make_row("usage", amounts.total, tenant_id, **event)


def make_kept(kind="storage", size_bytes=12_345_678, duration_ms=3_599_993, **fields):
    event = {
        "adapter_id": "ada_1", "adapter_version": 3, "adapter_digest": "d" * 64, "tier": "store",
        "size_bytes": size_bytes, "slabs": 0, "duration_ms": duration_ms, "price_version": 1,
        "started_at_ms": NOW_MS - duration_ms, f"{kind}_nanousd": KEPT_PRICE,
    } | fields  # fmt: skip
    return make_row(kind, kept_amount(size_bytes, duration_ms, KEPT_PRICE), **event)


def make_rows(seed, count, tenant_ids=("ten_1", "ten_2")):
    """Random rows of every kind, `count` for each tenant in turn."""
    chance, rows = random.Random(seed), []
    for tenant_id in tenant_ids:
        for _ in range(count):
            kind = chance.choice(("usage",) * 6 + (*KEPT_KINDS, "credit", "payment"))
            if kind == "usage":
                prompt = chance.randrange(1, 10**5)
                finish_reason, stop_cause = chance.choice(_ENDS)
                row = make_usage(
                    tenant_id, prompt, chance.randrange(prompt + 1), chance.randrange(3000),
                    request_id=f"{chance.getrandbits(128):032x}", model=chance.choice(_NAMES),
                    finish_reason=finish_reason, stop_cause=stop_cause,
                    is_failed=chance.random() < 0.1,
                )  # fmt: skip
            elif kind in KEPT_KINDS:
                row = make_kept(kind, chance.randrange(10**10), chance.randrange(10**7))
                row |= {"tenant_id": tenant_id, "debit_account": f"tenant/{tenant_id}"}
            else:
                amount, memo = chance.randrange(10**12), chance.choice(_NAMES)
                row = make_row(kind, amount, tenant_id, is_charge=False, memo=memo)
            rows.append(row)
    return rows


def seal(rows, signer=SIGNER, **changes):
    """Receipts of rows, numbered, chained and signed. changes: made to each before its signing."""
    receipts, last = [], {}
    for entry_id, row in enumerate(rows, start=1):
        seq, prev = last.get(row["tenant_id"], (0, GENESIS))
        place = {
            "entry_id": entry_id,
            "receipt_seq": seq + 1,
            "prev_sha256": prev,
            "signing_key": signer.key_id,
        }
        receipt = receipt_of(row | place) | changes
        receipts.append(sign(receipt, signer))
        last[row["tenant_id"]] = (seq + 1, receipts[-1]["sha256"])
    return receipts


def sign(receipt, signer=SIGNER):
    """Hash and sign a receipt with its current content, even if that is wrong."""
    unsealed = dict(receipt) | {"signing_key": signer.key_id}
    sha256 = sha256_of(unsealed)
    return unsealed | {"sha256": sha256, "signature": signer.sign(sha256)}


def reverse(receipt):
    """The row of a correction that reverses a receipt."""
    row = make_row(
        "correction" if receipt["kind"] in CHARGES else "reversal",
        abs(receipt["amount_nanousd"]),
        receipt["tenant_id"],
        reverses_entry_id=receipt["entry_id"],
        memo="answered with an error",
    )
    debit, credit = receipt["credit_account"], receipt["debit_account"]
    return row | {"debit_account": debit, "credit_account": credit}
