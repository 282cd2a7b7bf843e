import pytest

from server.billing.receipts.check import ReceiptCheck
from server.billing.receipts.receipt import COLUMNS, GENESIS
from server.billing.receipts.signing import Signer
from tests.server.factories import SIGNER
from tests.server.receipt_makers import (
    make_kept,
    make_row,
    make_rows,
    make_usage,
    reverse,
    seal,
    sign,
)

KEYS = {SIGNER.key_id: SIGNER.public}
STRANGER = Signer(bytes(32))


def check(receipts, *, first_row=1, keys=KEYS, **options):
    found = ReceiptCheck(keys, **options)
    for row, receipt in enumerate(receipts, start=first_row):
        found.add(row, receipt)
    found.finish()
    return found


def findings(receipts, **options):
    """(row, field) of each finding."""
    return [(f.row, f.field) for f in check(receipts, **options).findings]


def test_what_a_ledger_posted_holds_whatever_it_is():
    found = check(seal(make_rows(1, 60)), is_complete=True)
    assert (found.findings, found.gaps, found.num_receipts) == ([], [], 120)


def test_the_summary_is_what_the_receipts_say():
    receipts = seal(make_rows(3, 40))
    found = check(receipts)
    assert list(found.tenants) == ["ten_1", "ten_2"]
    for tenant_id, tenant in found.tenants.items():
        own = [receipt for receipt in receipts if receipt["tenant_id"] == tenant_id]
        assert (tenant.first_seq, tenant.last_seq, tenant.num_receipts) == (1, 40, 40)
        assert tenant.total_nanousd == sum(receipt["amount_nanousd"] for receipt in own)
        for name, count in tenant.tokens.items():
            assert count == sum(receipt[name] or 0 for receipt in own)
        for kind, amount in tenant.amounts.items():
            assert amount == sum(r["amount_nanousd"] for r in own if r["kind"] == kind)


@pytest.mark.parametrize("name", COLUMNS)
def test_any_field_that_is_changed_is_found_in_its_row(name):
    receipts = seal([make_usage(), make_usage(), make_usage()])
    value = receipts[1][name]
    if value is None or isinstance(value, str):
        changed = "1" + (value or "")[1:]
        changed = changed if changed != value else "2" + changed[1:]
    else:
        changed = 1 - value
    found = check([receipts[0], {**receipts[1], name: changed}, receipts[2]]).findings
    assert 2 in {finding.row for finding in found}


def test_a_hash_that_was_made_to_fit_again_does_not_have_the_signature():
    receipts = seal([make_usage(), make_usage()])
    forged = sign({**receipts[0], "model": "cheap"}, STRANGER)
    forged |= {"signing_key": SIGNER.key_id}
    [finding] = check([forged | {"sha256": receipts[0]["sha256"]}, receipts[1]]).findings
    assert (finding.row, finding.entry_id, finding.request_id) == (1, 1, forged["request_id"])


def test_another_ones_signature_counts_for_nothing():
    receipts = seal([make_usage()], STRANGER)
    assert findings(receipts) == [(1, "signing_key")]
    assert findings(receipts, keys={STRANGER.key_id: STRANGER.public}) == []
    assert findings(receipts, keys={STRANGER.key_id: SIGNER.public}) == [(1, "signature")]


def test_a_signature_that_reads_as_the_same_bytes_is_another_signature():
    """The last base64 digit of a signature has four unused bits."""
    [receipt] = seal([make_usage()])
    body, last = receipt["signature"][:-3], receipt["signature"][-3]
    assert last in "AQgw"
    changed = body + chr(ord(last) + 1) + "=="
    assert findings([{**receipt, "signature": changed}]) == [(1, "signature")]


# ---- signed receipts that are wrong ----

CHARGED_FAILURE = {"finish_reason": "error", "stop_cause": "engine_failure", "amount_nanousd": 3900}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (make_usage() | {"amount_nanousd": 3901}, "amount_nanousd"),
        (make_usage() | {"completion_nanousd": 599}, "amount_nanousd"),
        (make_usage() | {"cached_tokens": 1}, "amount_nanousd"),
        (make_usage() | {"is_failed": True}, "amount_nanousd"),
        (make_usage() | CHARGED_FAILURE, "amount_nanousd"),
        (make_usage(prompt=3, cached=4), "cached_tokens"),
        (make_kept() | {"amount_nanousd": 1}, "amount_nanousd"),
        (make_kept("pinned") | {"size_bytes": 10**12}, "amount_nanousd"),
        (make_kept() | {"credit_account": "revenue/usage"}, "credit_account"),
        (make_usage() | {"debit_account": "tenant/ten_2"}, "debit_account"),
        (make_usage() | {"period": "2026-01"}, "period"),
        (make_row("credit", 5, is_charge=True), "credit_account"),
        (make_row("payment", 5, is_charge=False, reverses_entry_id=1), "reverses_entry_id"),
        (make_row("correction", 5, is_charge=False), "reverses_entry_id"),
        (make_row("correction", 5, is_charge=True, reverses_entry_id=1), "debit_account"),
        (make_row("reversal", 5, is_charge=False, reverses_entry_id=1), "debit_account"),
        (make_row("gift", 5), "kind"),
        (make_usage() | {"journal_seq": None}, "journal_seq"),
        (make_kept() | {"tier": None}, "tier"),
    ],
)
def test_what_its_own_ledger_signed_is_recomputed_all_the_same(row, field):
    assert field in {finding[1] for finding in findings(seal([row]))}


def test_dollars_are_those_of_the_nano_dollars():
    assert findings(seal([make_usage()], amount_usd="0.000000001")) == [(1, "amount_usd")]


def test_a_number_is_no_truth_and_no_fraction():
    for value in (True, 1.0, "1"):
        assert (1, "entry_id") in findings(seal([make_usage()], entry_id=value))


def test_what_was_rated_0_was_free_and_is_good():
    free = [
        make_usage(finish_reason="error", stop_cause="engine_failure"),
        make_usage(is_failed=True),
        make_usage(price_version=None, prompt_nanousd=None, cached_nanousd=None,
                   completion_nanousd=None) | {"amount_nanousd": 0},
    ]  # fmt: skip
    found = check(seal(free))
    assert (found.findings, found.tenants["ten_1"].total_nanousd) == ([], 0)


# ---- the chain ----


def test_a_receipt_that_was_taken_out_leaves_a_gap_by_number():
    receipts = seal(make_rows(5, 9, ["ten_1"]))
    part = receipts[2:4] + receipts[6:]
    found = check(part)
    assert found.findings == []
    assert [(gap.first_seq, gap.last_seq) for gap in found.gaps] == [(5, 6)]
    assert found.tenants["ten_1"].num_missing == 2
    complete = check(part, is_complete=True)
    assert [(f.row, f.field) for f in complete.findings] == [(1, "receipt_seq"), (3, "receipt_seq")]
    assert "receipts 1 to 2 are missing" in complete.findings[0].message
    assert "receipts 5 to 6 are missing" in complete.findings[1].message


def test_a_receipt_that_comes_twice_or_too_late_is_named():
    first, second, third = seal(make_rows(6, 3, ["ten_1"]))
    assert findings([first, second, second, third]) == [(3, "receipt_seq")]
    assert findings([first, third, second]) == [(3, "receipt_seq")]


def test_another_history_of_the_same_length_does_not_fit_in():
    honest = seal(make_rows(7, 3, ["ten_1"]))
    other = seal(make_rows(8, 3, ["ten_1"]))
    assert findings([honest[0], other[1], honest[2]]) == [(2, "prev_sha256"), (3, "prev_sha256")]


def test_the_first_receipt_of_a_tenant_follows_nothing():
    [receipt] = seal([make_usage()])
    assert receipt["prev_sha256"] == GENESIS
    assert findings([sign({**receipt, "prev_sha256": "1" * 64})]) == [(1, "prev_sha256")]


def test_a_changed_receipt_is_found_once_and_those_after_it_hold():
    receipts = seal([make_usage() for _ in range(4)])
    for changes in ({"model": "other"}, {"sha256": "1" * 64}):
        changed = [receipts[0], receipts[1] | changes, *receipts[2:]]
        assert {row for row, _ in findings(changed)} == {2}


def test_findings_are_counted_and_only_so_many_kept():
    [receipt] = seal([make_usage()])
    found = check([receipt] * 1200)
    assert (len(found.findings), found.num_findings) == (1000, 1199)


# ---- corrections beside what they reverse ----


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, None),
        ({"amount_nanousd": 1}, "amount_nanousd"),
        ({"reverses_entry_id": 7}, "reverses_entry_id"),
        ({"debit_account": "revenue/storage"}, "debit_account"),
    ],
)
def test_a_correction_undoes_all_of_what_it_reverses(changes, field):
    receipt, _ = both = seal([make_usage(), reverse(seal([make_usage()])[0]) | changes])
    found = ReceiptCheck(KEYS)
    found.add(1, receipt)
    found.add_reversal(2, *both)
    assert [f.field for f in found.findings] == ([] if field is None else [field])
