"""Compares budgets with a model of plain sums over random sequences of holds and entries."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from server.billing import budgets, ledger
from server.billing.budgets import Budget, BudgetExhausted, BudgetHeld
from server.billing.credits import CreditKind, post_correction, post_credit
from server.billing.holds import insert_hold, void_expired, void_refused
from server.billing.months import end_of, month_of
from server.billing.rating import amount_nanousd
from server.billing.tables import monthly_spend, usage_events
from server.database.database import DEFAULT_FILE, Database
from tests.server.budget_model import SLACK_MS, BudgetModel, Held
from tests.server.factories import ENGINE, NOW_MS, SIGNER, make_end, make_hold, make_price
from tests.server.factories import make_tenant as new_tenant

_TOKENS = st.one_of(st.integers(1, 9), st.sampled_from([255, 256, 257, 600]))


class _Crash(Exception):
    """Stands for the death of the process before its transaction is committed."""


class BudgetMachine(RuleBasedStateMachine):
    """Runs a tenant's budgets against BudgetModel.

    The test sets `url`, a function that returns an empty database, and `folder`. The engine's clock
    is true; a gateway's may differ from it by the slack. Limits are only raised, since money spent
    before might exceed a lower limit.
    """

    @initialize(
        monthly=st.integers(100_000, 1_500_000),
        prepaid=st.one_of(st.none(), st.integers(0, 10_000)),
        before_ms=st.integers(0, 2 * SLACK_MS),
    )
    def begin(self, monthly, prepaid, before_ms):
        self.database = Database(self.url(), data_dir=self.folder)
        self.tenant_id = new_tenant(self.database).tenant_id
        self.price = make_price(self.database)
        price = self.price
        self.model = BudgetModel(price.prompt_nanousd, price.completion_nanousd)
        self.true_ms, self.skew_ms, self.seq = end_of(month_of(NOW_MS)) - before_ms, 0, 0
        self.unsent, self.ends, self.posted, self.corrected = set(), [], {}, set()
        self.set_limit("monthly", monthly)
        if prepaid is not None:
            self.set_limit("prepaid", prepaid)
            self.pay(prepaid + monthly, "payment")

    def teardown(self):
        if hasattr(self, "database"):
            self.database.close()

    @property
    def now_ms(self):
        return self.true_ms + self.skew_ms

    @contextmanager
    def transaction(self, crashes):
        try:
            with self.database.begin() as conn:
                yield conn
                if crashes:
                    raise _Crash
        except _Crash:
            pass

    def set_limit(self, kind, amount):
        budget = Budget(
            tenant_id=self.tenant_id, kind=kind, enforcement="hard", amount_nanousd=amount
        )
        with self.database.begin() as conn:
            budgets.set_budget(conn, budget, now_ms=self.now_ms)
        self.model.limits[kind] = amount

    @rule(by=st.integers(1, 200_000))
    def raise_limit(self, by):
        self.set_limit("monthly", self.model.limits["monthly"] + by)

    @rule(
        prompt=_TOKENS,
        each=_TOKENS,
        answers=st.integers(1, 3),
        unsent=st.booleans(),
        crashes=st.booleans(),
    )
    def hold(self, prompt, each, answers, unsent, crashes):
        request_id = f"r{self.seq}"
        self.seq += 1
        expected = self.model.cover(prompt, each * answers, answers, self.now_ms)
        if expected is None:
            is_held = self.model.is_held(prompt, answers, self.now_ms)
            kind = BudgetHeld if is_held else BudgetExhausted
            with pytest.raises(kind) as refused, self.transaction(crashes) as conn:
                self._open(conn, request_id, prompt, each, answers)
            if not is_held:
                left = self.model.remaining(refused.value.kind, self.now_ms)
                assert refused.value.needed_nanousd > left
            return
        with self.transaction(crashes) as conn:
            lease = self._open(conn, request_id, prompt, each, answers)
        assert lease == expected
        if not crashes:
            self.model.held[request_id] = Held(prompt, lease, answers)
            if unsent:
                self.unsent.add(request_id)

    def _open(self, conn, request_id, prompt, each, answers):
        lease = budgets.cover(
            conn, self.tenant_id, self.price, prompt, each * answers,
            num_answers=answers, now_ms=self.now_ms,
        )  # fmt: skip
        hold = make_hold(
            self.price, request_id, tenant_id=self.tenant_id, num_prompt_tokens=prompt,
            token_lease=lease, expires_at_ms=self.true_ms + 1000,
        )  # fmt: skip
        insert_hold(conn, hold)
        return lease

    def _one_of(self, data, ids):
        return data.draw(st.sampled_from(sorted(ids)))

    @precondition(lambda self: self.model.held)
    @rule(data=st.data(), more=_TOKENS, crashes=st.booleans())
    def extend(self, data, more, crashes):
        request_id = self._one_of(data, self.model.held)
        hold = self.model.held[request_id]
        wanted = hold.lease + more * hold.answers
        with self.transaction(crashes) as conn:
            lease = budgets.extend(
                conn, request_id, wanted, num_answers=hold.answers, now_ms=self.now_ms
            )
        assert lease == self.model.extend(hold, wanted, self.now_ms)
        if not crashes:
            hold.lease = lease

    @precondition(lambda self: self.running)
    @rule(data=st.data(), share=st.floats(0, 1), is_failure=st.booleans(), settles=st.booleans())
    def end(self, data, share, is_failure, settles):
        """End a request in the engine's journal; the ledger settles it now or later."""
        cause = "engine_failure" if is_failure else "eos"
        request_id = self._one_of(data, self.running)
        hold = self.model.held[request_id]
        record = make_end(
            len(self.ends) + 1, request_id, tenant_id=self.tenant_id, at=self.true_ms / 1000,
            num_prompt_tokens=hold.prompt, num_completion_tokens=int(hold.lease * share),
            stop_cause=cause, finish_reason="error" if cause == "engine_failure" else "stop",
        )  # fmt: skip
        self.ends.append(record)
        if settles:
            self.settle(count=len(self.ends), crashes=False)

    @property
    def running(self):
        ended = {record.request_id for record in self.ends}
        return self.model.held.keys() - self.unsent - ended

    @precondition(lambda self: len(self.ends) > len(self.posted))
    @rule(count=st.integers(1, 3), crashes=st.booleans())
    def settles(self, count, crashes):
        self.settle(count, crashes)

    def settle(self, count, crashes):
        records = self.ends[len(self.posted) :][:count]
        with self.transaction(crashes) as conn:
            ledger.post(conn, SIGNER, ENGINE, records, self.now_ms)
        if crashes:
            return
        for record in records:
            hold = self.model.held.pop(record.request_id)
            cost = self.model.cost(hold.prompt, record.num_completion_tokens)
            cost = 0 if record.stop_cause == "engine_failure" else cost
            month = month_of(round(record.at * 1000))
            self.model.charges[record.request_id] = (month, cost)
            self.posted[record.request_id] = cost

    @precondition(lambda self: self.unsent)
    @rule(data=st.data(), expires=st.booleans())
    def void(self, data, expires):
        request_id = self._one_of(data, self.unsent)
        with self.database.begin() as conn:
            if expires:
                self.true_ms += 2000
                sent = self.model.held.keys() - {request_id}
                voided = void_expired(
                    conn, ENGINE, as_of_ms=self.true_ms, still_open=sent, now_ms=self.now_ms
                )
                assert voided == [request_id]
            else:
                assert void_refused(conn, request_id, self.now_ms)
        self.unsent.remove(request_id)
        del self.model.held[request_id]

    @precondition(lambda self: any(self.correctable))
    @rule(data=st.data(), failed=st.booleans())
    def correct(self, data, failed):
        """Reverse a charge, as the gateway does after an error answer or as the operator does."""
        request_id = self._one_of(data, self.correctable)
        with self.database.begin() as conn:
            if failed:
                assert ledger.mark_failed(conn, SIGNER, request_id, self.now_ms)
            else:
                query = sa.select(usage_events.c.event_id).filter_by(request_id=request_id)
                post_correction(
                    conn, SIGNER, conn.execute(query).scalar_one(), memo=None,
                    idempotency_key=f"correct {request_id}", now_ms=self.now_ms,
                )  # fmt: skip
        self.corrected.add(request_id)
        del self.model.charges[request_id]

    @property
    def correctable(self):
        return {id for id, cost in self.posted.items() if cost and id not in self.corrected}

    @rule(amount=st.integers(1, 500_000), kind=st.sampled_from(["credit", "payment"]))
    def pay(self, amount, kind: CreditKind):
        self.seq += 1
        with self.database.begin() as conn:
            post_credit(
                conn, SIGNER, kind, self.tenant_id, amount,
                memo=None, idempotency_key=f"pay {self.seq}", now_ms=self.now_ms,
            )  # fmt: skip
        self.model.paid += amount

    @rule(
        to_month_end=st.booleans(),
        ms=st.one_of(st.integers(1, SLACK_MS), st.integers(1, 20 * 86_400_000)),
    )
    def time_goes_on(self, to_month_end, ms):
        if to_month_end:
            ms = max(1, end_of(month_of(self.true_ms)) - self.true_ms + min(ms, SLACK_MS) // 4)
        self.true_ms += ms

    @rule(skew_ms=st.integers(-SLACK_MS, SLACK_MS))
    def clock_jumps(self, skew_ms):
        self.skew_ms = skew_ms

    @invariant()
    def remaining_is_the_limit_less_what_is_posted_and_held(self):
        if not hasattr(self, "model"):
            return
        sums = self.database.read_sync(lambda c: budgets.read_sums(c, self.tenant_id, self.now_ms))
        for kind, limit in self.model.limits.items():
            assert sums.remaining(kind, limit) == self.model.remaining(kind, self.now_ms)

    @invariant()
    def no_month_comes_to_more_than_the_limit(self):
        if not hasattr(self, "model"):
            return
        spent = self.database.read_sync(lambda c: list(c.execute(sa.select(monthly_spend))))
        for row in spent:
            assert row.amount_nanousd == self.model.spent(row.month)
            assert 0 <= row.amount_nanousd <= self.model.limits["monthly"]
        if "prepaid" in self.model.limits:
            assert self.model.remaining("prepaid", self.now_ms) >= 0


def run(folder, url, max_examples, steps):
    BudgetMachine.folder, BudgetMachine.url = folder, staticmethod(url)
    run_state_machine_as_test(
        BudgetMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def new_sqlite(migrated_sqlite, tmp_path):
    def url():
        for suffix in ("-wal", "-shm"):
            (tmp_path / (DEFAULT_FILE + suffix)).unlink(missing_ok=True)
        shutil.copy(migrated_sqlite, tmp_path / DEFAULT_FILE)
        return f"sqlite:///{tmp_path / DEFAULT_FILE}"

    return url


def test_budgets_are_what_the_model_says_whatever_happens(new_sqlite, tmp_path):
    run(tmp_path, new_sqlite, max_examples=12, steps=30)


def test_budgets_are_what_the_model_says_on_postgresql(empty_postgres, tmp_path):
    run(tmp_path, empty_postgres, max_examples=4, steps=25)


@pytest.mark.soak
def test_budgets_are_what_the_model_says_for_long(new_sqlite, tmp_path):
    run(tmp_path, new_sqlite, max_examples=300, steps=60)


def test_four_gateways_at_once_never_go_over_a_tiny_budget(postgres_database, tmp_path):
    """Each of 4 gateways runs 50 requests that cover, extend until nothing is left, and end."""
    price = make_price(postgres_database)
    tenant_id, limit = new_tenant(postgres_database).tenant_id, 1_000_003
    budget = Budget(tenant_id=tenant_id, kind="monthly", enforcement="hard", amount_nanousd=limit)
    postgres_database.write_sync(lambda c: budgets.set_budget(c, budget, now_ms=NOW_MS))
    url = postgres_database.url.render_as_string(False)
    refused, used = [], []
    start = threading.Barrier(4)

    def gateway(number):
        with closing(Database(url, data_dir=tmp_path)) as database:
            start.wait(30)
            for index in range(50):
                request(database, f"g{number}-{index}", number * 50 + index + 1)

    def request(database, request_id, seq):
        def open_one(conn):
            lease = budgets.cover(conn, tenant_id, price, 3, 9, num_answers=1, now_ms=NOW_MS)
            insert_hold(
                conn,
                make_hold(
                    price, request_id, tenant_id=tenant_id, num_prompt_tokens=3,
                    token_lease=lease, engine_id=f"engine of {seq}",
                ),
            )  # fmt: skip
            return lease

        try:
            lease = database.write_sync(open_one, order=tenant_id)
        except (BudgetExhausted, BudgetHeld):
            refused.append(request_id)
            return
        more = database.write_sync(
            lambda c: budgets.extend(c, request_id, 12, num_answers=1, now_ms=NOW_MS),
            order=tenant_id,
        )
        assert more >= lease
        end = make_end(
            1, request_id, tenant_id=tenant_id, num_prompt_tokens=3, num_completion_tokens=more
        )
        database.write_sync(lambda c: ledger.post(c, SIGNER, f"engine of {seq}", [end], NOW_MS))
        used.append(amount_nanousd(3, 0, more, price))
        sums = database.read_sync(lambda c: budgets.read_sums(c, tenant_id, NOW_MS))
        assert sums.remaining("monthly", limit) >= 0

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(gateway, range(4)))
    sums = postgres_database.read_sync(lambda c: budgets.read_sums(c, tenant_id, NOW_MS))
    assert sums.spent_nanousd == sum(used) <= limit
    assert sums.held_nanousd == 0
    assert refused, "the budget was not reached"
    assert sums.remaining("monthly", limit) < amount_nanousd(3, 0, 1, price)
