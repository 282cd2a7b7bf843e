"""Credits and corrections move a balance once, and a balance is the sum of its entries."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from registry.errors import Fault
from registry.tables import audit_log
from server.api.errors import answer_of
from server.billing import credits, holds, ledger
from server.billing.budgets import read_sums
from server.billing.tables import entries
from tests.server.factories import ENGINE, NOW_MS, SIGNER, make_end, make_hold, make_price
from tests.server.in_process import User


def credit(conn, key, amount=10, memo=None, kind="credit", tenant_id="ten_1"):
    return credits.post_credit(
        conn, SIGNER, kind, tenant_id, amount, memo=memo, idempotency_key=key, now_ms=NOW_MS
    )


def correct(conn, entry_id, key, memo=None):
    return credits.post_correction(
        conn, SIGNER, entry_id, memo=memo, idempotency_key=key, now_ms=NOW_MS
    )


def use(conn, price, number, **fields):
    """Post a request of 7 prompt and 5 completion tokens; return its entry's id."""
    hold = make_hold(price, f"r{number}")
    holds.insert_hold(conn, hold)
    record = make_end(number, f"r{number}", **fields)
    assert ledger.post(conn, SIGNER, ENGINE, [record], NOW_MS).posted == 1
    return conn.scalar(sa.select(sa.func.max(entries.c.entry_id)))


def test_one_key_posts_one_entry(each_database):
    first = each_database.write_sync(lambda c: credit(c, "k", memo="welcome"))
    assert each_database.write_sync(lambda c: credit(c, "k", memo="welcome")) == first
    assert each_database.read_sync(lambda c: read_sums(c, "ten_1", NOW_MS)).balance_nanousd == 10
    others = {"amount": 11}, {"kind": "payment"}, {"memo": "bye"}, {"tenant_id": "ten_2"}
    for other in others:
        with pytest.raises(Fault) as refused:
            each_database.write_sync(
                lambda c, other=other: credit(c, "k", **{"memo": "welcome"} | other)
            )
        assert (answer_of(refused.value).status, refused.value.code) == (
            422,
            "idempotency_key_reused",
        )
    with pytest.raises(Fault) as refused:
        each_database.write_sync(lambda c: correct(c, first["entry_id"], "k", memo="welcome"))
    assert answer_of(refused.value).status == 422


def test_one_key_of_many_at_once_posts_one_entry(postgres_database):
    def post(_):
        with postgres_database.begin() as conn:
            return credit(conn, "k")["entry_id"]

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(post, range(8))) == {1}


def test_an_entry_is_corrected_once(database):
    price = make_price(database)
    used = database.write_sync(lambda c: use(c, price, 1))
    undone = database.write_sync(lambda c: correct(c, used, "k", memo="outage"))
    assert undone["reverses_entry_id"] == used
    assert undone["kind"] == "correction"
    assert database.read_sync(lambda c: read_sums(c, "ten_1", NOW_MS)).balance_nanousd == 0
    assert database.write_sync(lambda c: correct(c, used, "k", memo="outage")) == undone
    free = database.write_sync(
        lambda c: use(c, price, 2, finish_reason="error", stop_cause="engine_failure")
    )
    for entry_id, status in ((used, 409), (undone["entry_id"], 400), (free, 400), (99, 404)):
        with pytest.raises(Fault) as refused:
            database.write_sync(lambda c, entry_id=entry_id: correct(c, entry_id, "other"))
        assert answer_of(refused.value).status == status
    # A failure that is reported late finds the entry reversed already.
    assert database.write_sync(lambda c: ledger.mark_failed(c, SIGNER, "r1", NOW_MS)) is None


# ---- over HTTP ----


def post(user: User, path, body, key="k"):
    headers = {} if key is None else {"idempotency-key": key}
    return user.call("POST", f"/admin/v1/{path}", body, headers=headers)


def test_an_operator_gives_and_takes_and_the_tenant_sees_what_is_left(product):
    operator, acme = product.operator, product.user("acme")
    paid = post(operator, "tenants/acme/payments", {"amount_usd": "12.5", "memo": "INV-1"}, "p")
    assert paid.status_code == 201
    given = post(operator, "tenants/acme/credits", {"amount_nanousd": 5}, "c").json()
    assert post(operator, "tenants/acme/credits", {"amount_nanousd": 5}, "c").json() == given
    other = post(operator, "tenants/acme/credits", {"amount_nanousd": 6}, "c")
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    left = acme.call("GET", "/v1/balance").json()
    assert (left["balance_usd"], left["available_nanousd"]) == ("12.500000005", 12_500_000_005)
    body = {"entry_id": paid.json()["entry_id"], "memo": "bounced"}
    undone = post(operator, "corrections", body, "u").json()
    assert (undone["kind"], undone["amount_nanousd"]) == ("reversal", 12_500_000_000)
    stays = post(operator, "corrections", {"entry_id": undone["entry_id"]}, "v").json()["error"]
    assert "is a reversal and stays" in stays["message"]
    acme.complete("base")
    seen = operator.call("GET", "/admin/v1/tenants/acme/balance").json()
    assert (seen["balance_nanousd"], seen["tenant"]) == (5, "acme")
    assert seen["held_nanousd"] > 0
    assert seen["available_nanousd"] == 5 - seen["held_nanousd"]
    logged = product.gateway.database.read_sync(
        lambda conn: list(conn.scalars(sa.select(audit_log.c.action)))
    )
    acts = [action for action in logged if action.startswith("ledger.")]
    assert acts == ["ledger.payment", "ledger.credit", "ledger.reversal"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"amount_usd": "1", "amount_nanousd": 1},
        {"amount_usd": "-1"},
        {"amount_usd": "0.0"},
        {"amount_usd": "1e3"},
        {"amount_usd": "1.0000000001"},
        {"amount_usd": "١"},
        {"amount_usd": 1.5},
        {"amount_nanousd": 0},
        {"amount_nanousd": 10**15 + 1},
        {"amount_usd": "1", "memo": "x" * 513},
        {"amount_usd": "1", "memo": "a\0b"},
        {"amount_usd": "1", "cents": 1},
    ],
    ids=ascii,
)
def test_an_amount_that_cannot_be_is_refused(product, body):
    product.user("acme")
    assert post(product.operator, "tenants/acme/credits", body).status_code == 400
    left = product.operator.call("GET", "/admin/v1/tenants/acme/balance").json()
    assert left["balance_nanousd"] == 0


@pytest.mark.parametrize("key", [None, "", "two words", "k" * 129])
def test_without_a_key_nothing_is_posted(product, key):
    product.user("acme")
    answer = post(product.operator, "tenants/acme/credits", {"amount_usd": "1"}, key)
    assert answer.status_code == 400
    left = product.operator.call("GET", "/admin/v1/tenants/acme/balance").json()
    assert left["balance_nanousd"] == 0
