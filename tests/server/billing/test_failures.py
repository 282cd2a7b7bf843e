import asyncio
import contextlib
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.messages import RequestOutput, SamplingParams, StopCause
from server.billing import failures
from server.billing import unanswered as unanswered_file
from server.billing.failures import Failures
from server.billing.holds import get_hold
from server.billing.unanswered import Unanswered
from server.database.database import LedgerUnavailable
from server.inference.generation_request import GenerationRequest
from server.inference.idempotency import (
    Claim,
    StoredAnswer,
    claim_key,
    store_answer,
    take_over_key,
)
from server.inference.outcomes import failure_of
from server.inference.ticket import Ticket, Timeouts
from tests.server.billing.test_pricing_differential import BROKEN
from tests.server.factories import (
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
    post_ends,
    receipts_of,
)

REQUEST = GenerationRequest(
    model="base", prompts=[[7]], sampling=SamplingParams(max_tokens=5), max_tokens=5
)
TICKET = Ticket(identity=None, request=REQUEST, request_id="r", timeouts=Timeouts(12, 60, 90))


class Away:
    """A database that cannot be written for a while."""

    def __init__(self, database):
        self._database = database
        self.is_away = True

    async def write(self, fn):
        if self.is_away:
            raise LedgerUnavailable("it is away")
        return await self._database.write(fn)


@pytest.fixture
def unanswered(tmp_path):
    return Unanswered(tmp_path / "unanswered")


@pytest.fixture
def held(database):
    insert_holds(database, make_hold(make_price(database)))
    return database


@pytest.fixture
def note(held, unanswered):
    return lambda request_id: asyncio.run(
        Failures(held, SIGNER, unanswered, take_over_key).note(request_id)
    )


def test_a_request_that_failed_before_it_was_settled_is_counted_and_free(held, note):
    note("r1")
    post_ends(held, make_end(1))
    [receipt] = receipts_of(held)
    assert (receipt["is_failed"], receipt["amount_nanousd"]) == (True, 0)
    assert receipt["completion_tokens"] == 5
    assert held.read_sync(lambda c: get_hold(c, "r1")).state == "posted"


def test_what_an_engine_ended_with_an_error_is_failed_and_free(each_database):
    """A request is failed if its client got an error that says that nothing was billed."""
    price, told = make_price(each_database), []
    for seq, (cause, num_tokens) in enumerate(product(get_args(StopCause), (0, 5)), 1):
        reason = "error" if cause in BROKEN or cause == "first_token_timeout" else "length"
        ended = {"finish_reason": reason, "stop_cause": cause, "num_completion_tokens": num_tokens}
        insert_holds(each_database, make_hold(price, f"r{seq}"))
        post_ends(each_database, make_end(seq, f"r{seq}", **ended))
        output = RequestOutput(request_id=f"r{seq}", seq=0, **ended)
        told.append(failure_of(TICKET, output))
    posted = receipts_of(each_database)
    assert len(posted) == len(told)
    for receipt, error in zip(posted, told, strict=True):
        assert receipt["is_failed"] == (error is not None), receipt
        assert (receipt["amount_nanousd"] == 0) == (error is not None), receipt


def test_one_that_was_settled_already_is_reversed_once(held, note):
    post_ends(held, make_end(1))
    note("r1")
    note("r1")
    charged, reversal = receipts_of(held)
    assert charged["amount_nanousd"] > 0
    assert reversal["kind"] == "correction"
    assert reversal["reverses_entry_id"] == charged["entry_id"]
    assert charged["amount_nanousd"] + reversal["amount_nanousd"] == 0


def test_what_cost_nothing_is_not_reversed(held, note):
    post_ends(held, make_end(1, finish_reason="error", stop_cause="engine_failure"))
    note("r1")
    assert len(receipts_of(held)) == 1


def test_a_failure_of_a_request_that_never_had_a_hold_is_nothing(held, note):
    note("stranger")
    assert receipts_of(held) == []


async def test_what_the_ledger_could_not_take_down_it_gets_when_it_is_back(
    held, unanswered, monkeypatch
):
    monkeypatch.setattr(failures, "_RETRY_S", 0)
    database = Away(held)
    noting = Failures(database, SIGNER, unanswered, take_over_key)
    await noting.note("r1")
    trying = asyncio.create_task(noting.run())
    await asyncio.sleep(0)
    database.is_away = False
    while held.read_sync(lambda c: get_hold(c, "r1")).failed_at_ms is None:
        await asyncio.sleep(0)
    trying.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await trying
    post_ends(held, make_end(1))
    assert receipts_of(held)[0]["is_failed"]


async def test_no_more_than_a_bounded_number_is_remembered(
    sqlite_database, unanswered, monkeypatch, caplog
):
    monkeypatch.setattr(failures, "MAX_REMEMBERED", 2)
    noting = Failures(Away(sqlite_database), SIGNER, unanswered, take_over_key)
    for name in ("a", "b", "c"):
        await noting.note(name)
    assert "request a failed and will be billed" in caplog.text


# ---- requests that a killed gateway left unanswered ----


async def take_over(database, path):
    """Start as the next gateway on the same folder, until all that was left is noted."""
    noting = Failures(database, SIGNER, Unanswered(path), take_over_key)
    running = asyncio.create_task(noting.run())
    while Unanswered(path).left:
        await asyncio.sleep(0)
    running.cancel()


@pytest.mark.parametrize("is_settled", [True, False], ids=["settled", "not settled"])
def test_the_next_gateway_makes_free_what_the_killed_one_had_not_answered(
    database, tmp_path, is_settled
):
    price, path = make_price(database), tmp_path / "unanswered"
    killed = Failures(database, SIGNER, Unanswered(path), take_over_key)
    for number in (1, 2, 3):
        insert_holds(database, make_hold(price, f"r{number}"))
        killed.expect(f"r{number}")
    killed.note_answered("r2")
    ends = [make_end(number, f"r{number}") for number in (1, 2, 3)]
    if is_settled:
        post_ends(database, *ends)
    asyncio.run(take_over(database, path))
    if not is_settled:
        post_ends(database, *ends)
    paid = Counter()
    for receipt in receipts_of(database):
        reversed_id = receipt["reverses_entry_id"]
        of = next((r for r in receipts_of(database) if r["entry_id"] == reversed_id), receipt)
        paid[of["request_id"]] += receipt["amount_nanousd"]
    assert {name for name, amount in paid.items() if amount} == {"r2"}


@pytest.mark.parametrize(
    ("status", "body"), [(None, None), (200, b""), (400, b""), (500, b""), (200, None)]
)
def test_a_repeat_gets_what_the_killed_gateway_stored_or_else_runs_at_once(
    held, tmp_path, status, body
):
    """status, body: of the stored answer, None if there is none; an answer that is too long to be
    kept has no body. What runs again was free the first time.
    """
    path, claim = tmp_path / "unanswered", Claim("ten_1", "completions", "k", "f" * 64, "r1")
    killed = Failures(held, SIGNER, Unanswered(path), take_over_key)
    killed.expect("r1")
    others = Claim("ten_2", "completions", "k", "f" * 64, "r2")
    for each in (claim, others):
        held.write_sync(lambda c, each=each: claim_key(c, each, 9000))
    if status:
        answer = StoredAnswer("r1", status, {}, body)
        held.write_sync(lambda c: store_answer(c, claim, answer))
    asyncio.run(take_over(held, path))
    is_kept = held.write_sync(lambda c: claim_key(c, claim, 9000)) is not None
    is_paid = held.read_sync(lambda c: get_hold(c, "r1")).failed_at_ms is None
    assert is_kept == is_paid == (body is not None and status < 500)
    assert held.write_sync(lambda c: claim_key(c, others, 9000)).status is None, "it still runs"


def test_a_failure_that_the_ledger_did_not_get_outlives_its_gateway(held, tmp_path):
    path = tmp_path / "unanswered"
    killed = Failures(Away(held), SIGNER, Unanswered(path), take_over_key)
    killed.expect("r1")
    asyncio.run(killed.note("r1"))
    killed.note_answered("r1")
    asyncio.run(take_over(held, path))
    assert held.read_sync(lambda c: get_hold(c, "r1")).failed_at_ms is not None


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.sampled_from("abcde"))),
    cut=st.integers(0, 3),
    max_lines=st.integers(1, 9),
)
def test_whatever_is_begun_and_not_ended_is_left_wherever_the_process_dies(steps, cut, max_lines):
    """cut: bytes that the last line lacks, so that it says nothing."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(unanswered_file, "_MAX_LINES", 1000 if cut else max_lines)
        path, due, before = Path(folder) / "unanswered", {}, {}
        first = Unanswered(path)
        for is_begun, request_id in steps:
            before = dict(due) if is_begun or request_id in due else before
            (first.add if is_begun else first.remove)(request_id)
            due = due | {request_id: 1} if is_begun else {k: 1 for k in due if k != request_id}
        with path.open("r+b") as file:
            file.truncate(max(0, path.stat().st_size - cut))
        second = Unanswered(path)
        second.add("next")
        assert set(second.left) == set(before if cut else due)
        assert set(Unanswered(path).left) == {*second.left, "next"}
