import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import sqlalchemy as sa

from server.accounts.tables import tenants
from server.billing import budgets, ledger
from server.billing.budgets import CLOCK_SLACK_MS, LEASE_TOKENS, Budget, BudgetExhausted
from server.billing.credits import post_credit
from server.billing.holds import get_hold, insert_hold
from server.billing.months import end_of
from server.billing.rating import TokenPrices
from server.billing.tables import holds
from server.database.database import Database
from tests.server.factories import (
    NOW_MS,
    SIGNER,
    make_end,
    make_hold,
    make_price,
    make_tenant,
)

PRICE = TokenPrices(prompt_nanousd=10, cached_nanousd=5, completion_nanousd=100)
FREE = TokenPrices(prompt_nanousd=0, cached_nanousd=0, completion_nanousd=0)


def give(database, tenant, amount, kind="monthly", enforcement="hard"):
    budget = Budget(
        tenant_id=tenant.tenant_id, kind=kind, enforcement=enforcement, amount_nanousd=amount
    )
    database.write_sync(lambda c: budgets.set_budget(c, budget, now_ms=NOW_MS))


def cover(database, tenant, prompt=7, wanted=1000, *, price=PRICE, num_answers=1, now_ms=NOW_MS):
    return database.write_sync(
        lambda c: budgets.cover(
            c, tenant.tenant_id, price, prompt, wanted, num_answers=num_answers, now_ms=now_ms
        )
    )


def extend(database, wanted, request_id="r1", *, num_answers=1):
    return database.write_sync(
        lambda c: budgets.extend(c, request_id, wanted, num_answers=num_answers, now_ms=NOW_MS)
    )


def hold(database, tenant, request_id="r1", **fields):
    price = make_price(database)
    made = make_hold(price, request_id, tenant_id=tenant.tenant_id, **fields)
    database.write_sync(lambda c: insert_hold(c, made))
    return made


def pay(database, tenant, amount):
    database.write_sync(
        lambda c: post_credit(
            c, SIGNER, "payment", tenant.tenant_id, amount,
            memo=None, idempotency_key=f"pay {amount}", now_ms=NOW_MS,
        )
    )  # fmt: skip


def end(database, tenant, seq, request_id="r1", **fields):
    record = make_end(seq, request_id, tenant_id=tenant.tenant_id, **fields)
    database.write_sync(lambda c: ledger.post(c, SIGNER, "engine-1", [record], NOW_MS))


def sums(database, tenant, now_ms=NOW_MS):
    return database.read_sync(lambda c: budgets.read_sums(c, tenant.tenant_id, now_ms))


def test_without_a_hard_budget_all_is_covered_at_once(database):
    tenant = make_tenant(database)
    give(database, tenant, 1, enforcement="soft")
    assert cover(database, tenant, wanted=100_000) == 100_000


def test_a_lease_is_a_share_of_what_remains_after_the_prompt_and_bounded_on_both_sides(database):
    tenant = make_tenant(database)
    give(database, tenant, 70 + 8 * 100 * 100)
    assert cover(database, tenant) == 100
    assert cover(database, tenant, wanted=5 * 1000, num_answers=5) == 5 * 20
    give(database, tenant, 70 + 40 * 100)
    assert cover(database, tenant) == 16
    give(database, tenant, 70 + 12 * 100 + 99)
    assert cover(database, tenant) == 12
    assert cover(database, tenant, wanted=9) == 9
    assert cover(database, tenant, wanted=5 * 1000, num_answers=5) == 10
    give(database, tenant, 10**9)
    assert cover(database, tenant) == LEASE_TOKENS
    assert cover(database, tenant, wanted=3 * 1000, num_answers=3) == 3 * LEASE_TOKENS


def test_a_budget_that_does_not_pay_one_token_of_each_answer_refuses(database):
    tenant = make_tenant(database)
    give(database, tenant, 70 + 200)
    assert cover(database, tenant, wanted=2000, num_answers=2) == 2
    give(database, tenant, 70 + 199)
    with pytest.raises(BudgetExhausted, match="monthly") as refused:
        cover(database, tenant, wanted=2000, num_answers=2)
    assert (refused.value.kind, refused.value.remaining_nanousd) == ("monthly", 269)
    assert refused.value.needed_nanousd == 270


def test_six_requests_at_once_of_a_fiftieth_of_what_is_left_all_pass(database):
    """Each may cost 0.0003 dollars, as one lease or more, and costs 0.00003."""
    tenant, price = make_tenant(database), replace(PRICE, completion_nanousd=1200)
    give(database, tenant, 1_500_000)
    for number in range(6):
        lease = cover(database, tenant, 50, 4000, price=price)
        assert lease >= 16, number
        hold(database, tenant, f"r{number}", amount_nanousd=50 * 10 + lease * 1200)


def test_holds_are_the_reason_only_while_they_are_and_nothing_is_noted_then(database):
    tenant = make_tenant(database)
    made = hold(database, tenant)
    for amount, is_held in ((made.amount_nanousd + 169, True), (170, True), (169, False)):
        give(database, tenant, amount)
        with pytest.raises(BudgetExhausted) as refused:
            cover(database, tenant)
        assert refused.value.is_held == is_held
        assert ("hold $0.0" in str(refused.value)) == is_held
        database.write_sync(
            partial(budgets.note_refusal, tenant_id=tenant.tenant_id, refused=refused.value)
        )
        noted = database.read_sync(budgets.get_budgets)[0].needed_nanousd
        assert noted == (1 if is_held else 170)
    give(database, tenant, made.amount_nanousd + 170)
    assert cover(database, tenant) == 1


def test_the_smallest_refusal_is_noted_until_a_request_passes_while_so_much_remains(database):
    tenant = make_tenant(database)
    give(database, tenant, 10_000)
    for needed, smallest, after in ((20_000,) * 3, (30_000, 20_000, 20_000), (10_000, 10_000, 1)):
        refused = BudgetExhausted("monthly", 100, needed)
        note = partial(budgets.note_refusal, tenant_id=tenant.tenant_id, refused=refused)
        database.write_sync(note)
        assert database.read_sync(budgets.get_budgets)[0].needed_nanousd == smallest
        cover(database, tenant)
        assert database.read_sync(budgets.get_budgets)[0].needed_nanousd == after


def test_what_costs_nothing_needs_no_budget(database):
    tenant = make_tenant(database)
    hold(database, tenant)
    give(database, tenant, 0)
    assert cover(database, tenant, price=FREE, wanted=100) == 100


def test_an_open_hold_is_spent_until_it_is_posted_and_then_what_it_cost_is(each_database):
    tenant = make_tenant(each_database)
    give(each_database, tenant, 10**6)
    made = hold(each_database, tenant)
    assert sums(each_database, tenant).held_nanousd == made.amount_nanousd
    end(each_database, tenant, 1)
    after = sums(each_database, tenant)
    assert after.held_nanousd == 0
    assert 0 < after.spent_nanousd == -after.balance_nanousd < made.amount_nanousd


def test_prepaid_leaves_in_the_balance_what_must_stay(database):
    tenant = make_tenant(database)
    give(database, tenant, 500, kind="prepaid")
    with pytest.raises(BudgetExhausted, match="prepaid"):
        cover(database, tenant)
    pay(database, tenant, 500 + 70 + 3 * 100)
    assert cover(database, tenant) == 3


def test_of_two_budgets_the_one_that_leaves_less_counts(database):
    tenant = make_tenant(database)
    pay(database, tenant, 70 + 3 * 100)
    give(database, tenant, 0, kind="prepaid")
    give(database, tenant, 70 + 4 * 100)
    assert cover(database, tenant) == 3
    give(database, tenant, 70 + 2 * 100)
    assert cover(database, tenant) == 2


def test_another_tenants_budget_and_holds_are_its_own(database):
    ours, theirs = make_tenant(database), make_tenant(database, "other")
    give(database, theirs, 0)
    hold(database, theirs)
    give(database, ours, 70 + 100)
    assert cover(database, ours) == 1


def test_extending_raises_lease_and_hold_together(each_database):
    tenant = make_tenant(each_database)
    price = make_price(each_database)
    made = hold(each_database, tenant, token_lease=10)
    give(each_database, tenant, made.amount_nanousd + 5 * price.completion_nanousd)
    assert extend(each_database, 12) == 12
    assert extend(each_database, 1000) == 15
    assert extend(each_database, 1000) == 15  # nothing is left
    found = each_database.read_sync(lambda c: get_hold(c, "r1"))
    assert found.token_lease == 15
    assert found.amount_nanousd == made.amount_nanousd + 5 * price.completion_nanousd


def test_an_extension_is_the_same_for_every_answer_and_a_share_of_what_is_left(database):
    tenant = make_tenant(database)
    made = hold(database, tenant, token_lease=20)
    give(database, tenant, made.amount_nanousd + 7 * make_price(database).completion_nanousd)
    assert extend(database, 2000, num_answers=2) == 26
    give(database, tenant, 10**12)
    assert extend(database, 2000, num_answers=2) == 26 + 2 * LEASE_TOKENS
    assert extend(database, 20) == 26 + 2 * LEASE_TOKENS  # a lease never shrinks


def test_without_a_hard_budget_an_extension_is_all_that_is_wanted(database):
    hold(database, make_tenant(database), token_lease=10)
    assert extend(database, 5000) == 5000


def test_a_hold_that_has_ended_is_not_extended(database):
    tenant = make_tenant(database)
    hold(database, tenant)
    end(database, tenant, 1)
    assert extend(database, 1000) == 0
    assert extend(database, 1000, "unknown") == 0


def test_a_new_month_is_a_new_budget_once_no_clock_can_still_be_in_the_old_one(database):
    tenant = make_tenant(database)
    make_price(database)
    new_year = end_of("2026-12")
    hold(database, tenant)
    end(database, tenant, 1, at=new_year / 1000 - 1)
    spent = sums(database, tenant, new_year - 1).spent_nanousd
    assert spent > 0
    give(database, tenant, spent)
    for at_ms in (new_year - 1, new_year + CLOCK_SLACK_MS - 1):
        with pytest.raises(BudgetExhausted):
            cover(database, tenant, now_ms=at_ms)
    give(database, tenant, 70 + 100)
    assert cover(database, tenant, now_ms=new_year + CLOCK_SLACK_MS) == 1


def test_a_budget_is_set_changed_and_removed(each_database):
    tenant = make_tenant(each_database)
    give(each_database, tenant, 7)
    give(each_database, tenant, 9)
    give(each_database, tenant, 1, kind="prepaid", enforcement="soft")
    found = each_database.read_sync(lambda c: budgets.get_budgets(c, [tenant.tenant_id]))
    assert [(b.kind, b.enforcement, b.amount_nanousd) for b in found] == [
        ("monthly", "hard", 9), ("prepaid", "soft", 1),
    ]  # fmt: skip
    remove = (tenant.tenant_id, "monthly", "hard")
    for was_there in (True, False):
        removed = each_database.write_sync(
            lambda c: budgets.remove_budget(c, *remove, now_ms=NOW_MS)
        )
        assert removed == was_there


def test_only_tenants_with_a_hard_budget_are_locked_until_their_request_is_held(postgres_database):
    database = postgres_database
    budgeted, free = make_tenant(database), make_tenant(database, "b")
    give(database, budgeted, 10**9)
    not_locked = sa.select(tenants.c.tenant_id).with_for_update(skip_locked=True)
    with database.begin() as conn:
        for tenant in (budgeted, free):
            budgets.cover(conn, tenant.tenant_id, PRICE, 1, 1, num_answers=1, now_ms=NOW_MS)
        found = database.write_sync(lambda c: c.scalars(not_locked).all())
    assert found == [free.tenant_id]


def test_two_gateways_that_lock_the_same_tenants_in_another_order_do_not_deadlock(
    postgres_database, tmp_path
):
    first = postgres_database
    tenants = sorted((make_tenant(first), make_tenant(first, "b")), key=lambda t: t.tenant_id)
    for tenant in tenants:
        give(first, tenant, 10**9)
    other = Database(first.url.render_as_string(False), data_dir=tmp_path)
    # Each group keeps its first lock until the other has one too, for at most 0.3 s. The wait times
    # out if both lock in the same order.
    both_locked = threading.Barrier(2)
    runs = []

    def lock(tenant):
        def write(conn):
            runs.append(tenant)
            budgets.cover(conn, tenant.tenant_id, PRICE, 1, 1, num_answers=1, now_ms=NOW_MS)
            with suppress(threading.BrokenBarrierError):
                both_locked.wait(0.3)

        return write

    def submit(database, tenants):
        ready, go = threading.Event(), threading.Event()
        held_up = database.submit(lambda c: (ready.set(), go.wait(10)))
        ready.wait(10)
        writes = [database.submit(lock(t), order=t.tenant_id) for t in tenants]
        return go, [held_up, *writes]

    try:
        groups = [submit(first, tenants), submit(other, tenants[::-1])]
        for go, _ in groups:
            go.set()
        for _, writes in groups:
            for write in writes:
                write.result(20)
    finally:
        other.close()
    assert len(runs) == 4, "a group was run again after a deadlock"


def test_a_hold_that_is_being_settled_is_not_waited_for(postgres_database):
    database = postgres_database
    tenant = make_tenant(database)
    give(database, tenant, 10**9)
    hold(database, tenant)
    with database.begin() as conn:
        conn.execute(sa.select(holds).with_for_update())
        assert extend(database, 1000) == 0
    assert extend(database, 1000) > 0
