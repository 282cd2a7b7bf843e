import dataclasses

import pytest

from engine.errors import EngineDeadError
from server.billing import holds, ledger
from server.billing.entries import Draft, post_entries
from server.billing.prices import get_price
from server.billing.receipts.check import ReceiptCheck
from server.billing.receipts.receipt import COLUMNS
from server.billing.receipts.signing import PublicKey, Signer
from server.billing.receipts.signing_keys import record_key
from tests.server.factories import ENGINE, NOW_MS, make_end, make_hold


@pytest.fixture
def product(product):
    write(product, lambda conn: record_key(conn, product.gateway.signer.public, NOW_MS))
    return product


def write(product, fn):
    return product.gateway.database.write_sync(fn)


def hold(user, request_id):
    def insert(conn):
        price = get_price(conn, 1)
        holds.insert_hold(conn, make_hold(price, request_id, tenant_id=user.tenant_id))

    write(user.product, insert)


def use(user, request_id, seq=1, **fields):
    """Hold and settle a request."""
    hold(user, request_id)
    record = make_end(seq, request_id, tenant_id=user.tenant_id, **fields)
    signer = user.product.gateway.signer
    write(user.product, lambda conn: ledger.post(conn, signer, ENGINE, [record], NOW_MS))


def get(user, path):
    answer = user.call("GET", f"/v1/receipts/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def keys_of(user):
    listed = get(user, "keys")["data"]
    return {found["key_id"]: PublicKey(bytes.fromhex(found["public_key"])) for found in listed}


def check(user, *documents):
    found = ReceiptCheck(keys_of(user))
    for row, document in enumerate(documents, start=1):
        found.add(row, document["receipt"])
        for correction in document["corrections"]:
            found.add_reversal(row, document["receipt"], correction)
    return found.findings


def test_a_receipt_is_found_by_the_ids_that_a_client_has(acme):
    use(acme, "abc")
    document = get(acme, "abc")
    assert (document["object"], document["corrections"]) == ("receipt", [])
    assert set(document["receipt"]) == set(COLUMNS)
    assert document["receipt"]["request_id"] == "abc"
    assert document["verified_with"] == document["receipt"]["signing_key"]
    for other in ("chatcmpl-abc", "cmpl-abc", "req_abc", "entry_1"):
        assert get(acme, other) == document
    assert check(acme, document) == []


def settle_asked(user, **fields):
    """Settle what the engine was asked for last."""
    seq, request = len(user.product.engines.asked), user.product.engines.asked[-1]
    record = make_end(seq, request.request_id, tenant_id=user.tenant_id, **fields)
    signer = user.product.gateway.signer
    write(user.product, lambda conn: ledger.post(conn, signer, ENGINE, [record], NOW_MS))


@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
def test_the_id_in_an_answers_header_finds_its_receipt(acme, key):
    body = {"model": "base", "prompt": "hi", "max_tokens": 3}
    ids = []
    for number in range(2):
        header = {name: f"{value}{number}" for name, value in key.items()} | {"x-request-id": "own"}
        answer = acme.call("POST", "/v1/completions", body, header)
        settle_asked(acme)
        ids.append(answer.headers["x-request-id"])
        assert get(acme, ids[-1]) == get(acme, answer.json()["id"])
    assert len({*ids, "own"}) == 3
    other = acme.product.user(f"other-{len(key)}").call("GET", f"/v1/receipts/{ids[0]}")
    assert other.json()["error"]["code"] == "receipt_not_found"


def test_an_error_that_an_engine_had_is_found_by_its_header_and_costs_nothing(acme):
    acme.product.engines.script = lambda _: [EngineDeadError("gone")]
    answer = acme.complete("base")
    assert answer.status_code == 503
    settle_asked(acme, finish_reason="error", stop_cause="engine_failure")
    receipt = get(acme, answer.headers["x-request-id"])["receipt"]
    assert (receipt["stop_cause"], receipt["amount_nanousd"]) == ("engine_failure", 0)


def test_of_an_error_before_the_engine_the_lookup_says_that_nothing_was_billed(acme):
    refused = acme.complete("base", max_tokens=-1)
    assert refused.status_code == 400
    answer = acme.call("GET", f"/v1/receipts/{refused.headers['x-request-id']}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "receipt_not_found")
    assert "nothing was billed" in answer.json()["error"]["message"]


def test_an_entry_that_is_no_request_has_its_number(acme):
    signer = acme.product.gateway.signer
    own = f"tenant/{acme.tenant_id}"
    credit = Draft(
        kind="credit", tenant_id=acme.tenant_id, debit_account="expense/credit",
        credit_account=own, amount_nanousd=5, at_ms=NOW_MS,
    )  # fmt: skip
    write(acme.product, lambda conn: post_entries(conn, signer, [credit], NOW_MS))
    document = get(acme, "entry_1")
    assert (document["receipt"]["kind"], document["receipt"]["amount_nanousd"]) == ("credit", -5)
    assert check(acme, document) == []


def test_what_reverses_a_receipt_comes_with_it(acme):
    use(acme, "abc")
    signer = acme.product.gateway.signer
    write(acme.product, lambda conn: ledger.mark_failed(conn, signer, "abc", NOW_MS + 5))
    document = get(acme, "abc")
    [correction] = document["corrections"]
    assert correction["amount_nanousd"] == -document["receipt"]["amount_nanousd"] < 0
    assert check(acme, document) == []
    assert get(acme, f"entry_{correction['entry_id']}")["receipt"] == correction


def test_until_it_is_settled_a_client_is_told_to_come_again(acme):
    hold(acme, "abc")
    for name in ("abc", "chatcmpl-abc"):
        answer = acme.call("GET", f"/v1/receipts/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "receipt_pending")
        assert answer.headers["retry-after"] == "1"
        others = acme.product.user(f"not-{name}").call("GET", f"/v1/receipts/{name}")
        assert others.json()["error"]["code"] == "receipt_not_found"
    write(acme.product, lambda conn: holds.void_refused(conn, "abc", NOW_MS))
    answer = acme.call("GET", "/v1/receipts/abc")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "receipt_not_found")
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize(
    "name", ["nothing", "entry_9", "entry_01", "entry_" + "9" * 30, "chatcmpl-"]
)
def test_an_id_that_is_nobodys_is_not_found(acme, name):
    answer = acme.call("GET", f"/v1/receipts/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "receipt_not_found")


def test_a_key_that_was_replaced_still_verifies_what_it_signed(acme):
    product = acme.product
    use(acme, "before")
    old = product.gateway.signer.key_id
    signer = Signer(bytes(range(1, 33)))
    product.gateway = dataclasses.replace(product.gateway, signer=signer)
    write(product, lambda conn: record_key(conn, signer.public, NOW_MS + 1000))
    use(acme, "after", seq=2)
    before, after = get(acme, "before"), get(acme, "after")
    assert (before["verified_with"], after["verified_with"]) == (old, signer.key_id)
    assert check(acme, before, after) == []
    listed = get(acme, "keys")["data"]
    assert [found["key_id"] for found in listed] == [signer.key_id, old]
    assert [found["created_at"] for found in listed] == [NOW_MS // 1000 + 1, NOW_MS // 1000]
    assert {found["algorithm"] for found in listed} == {"ed25519"}
    only_new = ReceiptCheck({signer.key_id: signer.public})
    only_new.add(1, before["receipt"])
    assert [finding.field for finding in only_new.findings] == ["signing_key"]


def test_the_receipts_of_all_attempts_are_found_by_the_id_of_any_of_them(acme):
    use(acme, "p.1")
    use(acme, "p.2", seq=2)
    use(acme, "abc", seq=3)
    listed = get(acme, "p/attempts")["data"]
    assert [each["receipt"]["request_id"] for each in listed] == ["p.1", "p.2"]
    assert [each["parent_id"] for each in listed] == ["p", "p"]
    assert listed[1] == get(acme, "p.2")
    for other in ("p.1", "chatcmpl-p.2", "cmpl-p"):
        assert get(acme, f"{other}/attempts")["data"] == listed
    assert get(acme, "abc/attempts")["data"] == [get(acme, "abc")]
    assert get(acme, "abc")["parent_id"] is None
    assert get(acme, "req_p") == get(acme, "p.2")
    use(acme, "p.3", seq=4, finish_reason="error", stop_cause="engine_failure")
    assert get(acme, "req_p") == get(acme, "p.2"), "the answer's, not the failed attempt's"
    hold(acme, "p.4")
    assert acme.call("GET", "/v1/receipts/req_p").json()["error"]["code"] == "receipt_pending"
    pending = acme.call("GET", "/v1/receipts/p/attempts")
    assert (pending.status_code, pending.json()["error"]["code"]) == (404, "receipt_pending")
