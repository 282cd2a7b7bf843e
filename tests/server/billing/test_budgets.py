import threading
from contextlib import suppress
from functools import partial

import pytest
import sqlalchemy as sa

from server.accounts.tables import tenants
from server.billing import budgets
from server.billing.budgets import CLOCK_SLACK_MS, LEASE_TOKENS, Budget, BudgetExhausted, BudgetHeld
from server.billing.holds import insert_hold
from server.billing.months import end_of
from server.billing.rating import TokenPrices
from server.billing.tables import holds
from server.database.database import Database
from tests.server.factories import (
    NOW_MS,
    make_end,
    make_hold,
    make_price,
    make_tenant,
    post_ends,
)

PRICE = TokenPrices(prompt_nanousd=10, cached_nanousd=5, completion_nanousd=100)
FREE = TokenPrices(prompt_nanousd=0, cached_nanousd=0, completion_nanousd=0)


def give(database, tenant, amount, enforcement="hard"):
    budget = Budget(
        tenant_id=tenant.tenant_id, kind="monthly", enforcement=enforcement, amount_nanousd=amount
    )
    database.write_sync(lambda c: budgets.set_budget(c, budget, now_ms=NOW_MS))


def cover(database, tenant, wanted=1000, *, price=PRICE, num_answers=1, now_ms=NOW_MS):
    return database.write_sync(
        lambda c: budgets.cover(
            c, tenant.tenant_id, price, 7, wanted, num_answers=num_answers, now_ms=now_ms
        )
    )


def extend(database, wanted, request_id="r1"):
    return database.write_sync(
        lambda c: budgets.extend(c, request_id, wanted, num_answers=1, now_ms=NOW_MS)
    )


def hold(database, tenant, **fields):
    made = make_hold(make_price(database), tenant_id=tenant.tenant_id, **fields)
    database.write_sync(lambda c: insert_hold(c, made))
    return made


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
    assert (refused.value.kind, refused.value.needed_nanousd) == ("monthly", 270)


def test_holds_are_the_reason_only_while_they_are(database):
    tenant = make_tenant(database)
    made = hold(database, tenant)
    for amount, is_held in ((made.amount_nanousd + 169, True), (170, True), (169, False)):
        give(database, tenant, amount)
        kind, words = (BudgetHeld, r"hold \$0\.0") if is_held else (BudgetExhausted, "monthly")
        with pytest.raises(kind, match=words):
            cover(database, tenant)
    give(database, tenant, made.amount_nanousd + 170)
    assert cover(database, tenant) == 1


def test_the_smallest_refusal_is_noted_until_a_request_passes_while_so_much_remains(database):
    tenant = make_tenant(database)
    give(database, tenant, 10_000)
    for needed, smallest, after in ((20_000,) * 3, (30_000, 20_000, 20_000), (10_000, 10_000, 1)):
        refused = BudgetExhausted("monthly", needed)
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


def test_another_tenants_budget_and_holds_are_its_own(database):
    ours, theirs = make_tenant(database), make_tenant(database, "other")
    give(database, theirs, 0)
    hold(database, theirs)
    give(database, ours, 70 + 100)
    assert cover(database, ours) == 1


def test_without_a_hard_budget_an_extension_is_all_that_is_wanted(database):
    hold(database, make_tenant(database), token_lease=10)
    assert extend(database, 5000) == 5000


def test_a_hold_that_has_ended_is_not_extended(database):
    tenant = make_tenant(database)
    hold(database, tenant)
    post_ends(database, make_end(1, tenant_id=tenant.tenant_id))
    assert extend(database, 1000) == 0
    assert extend(database, 1000, "unknown") == 0


def test_a_new_month_is_a_new_budget_once_no_clock_can_still_be_in_the_old_one(database):
    tenant = make_tenant(database)
    make_price(database)
    new_year = end_of("2026-12")
    hold(database, tenant)
    post_ends(database, make_end(1, tenant_id=tenant.tenant_id, at=new_year / 1000 - 1))
    spent = sums(database, tenant, new_year - 1).spent_nanousd
    assert spent > 0
    give(database, tenant, spent)
    for at_ms in (new_year - 1, new_year + CLOCK_SLACK_MS - 1):
        with pytest.raises(BudgetExhausted):
            cover(database, tenant, now_ms=at_ms)
    give(database, tenant, 70 + 100)
    assert cover(database, tenant, now_ms=new_year + CLOCK_SLACK_MS) == 1


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
