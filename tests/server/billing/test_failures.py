import asyncio
import contextlib
from itertools import product
from typing import get_args

import pytest

from engine.messages import AddRequest, RequestOutput, SamplingParams, StopCause
from server.api.foreign_errors import from_fault
from server.billing import failures, ledger
from server.billing.failures import Failures
from server.billing.holds import get_hold
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.database.database import LedgerUnavailable
from server.inference.outcomes import failure_of
from tests.server.billing.test_pricing_differential import BROKEN
from tests.server.factories import (
    ENGINE,
    NOW_MS,
    SIGNER,
    insert_holds,
    make_end,
    make_hold,
    make_price,
)

MESSAGE = AddRequest(
    request_id="r", tenant_id="ten_1", prompt_token_ids=(1,), token_lease=5, deadline_s=9,
    sampling_params=SamplingParams(max_tokens=5),
)  # fmt: skip


class Away:
    """A database that cannot be written for a while."""

    def __init__(self, database):
        self._database = database
        self.is_away = True

    async def write(self, fn):
        if self.is_away:
            raise LedgerUnavailable("it is away")
        return await self._database.write(fn)


def settle(database, *ends):
    database.write_sync(lambda c: ledger.post(c, SIGNER, ENGINE, ends, NOW_MS))


def receipts(database):
    return database.read_sync(lambda c: list(iterate_receipts(c, select_receipts())))


def note(database, request_id):
    asyncio.run(Failures(database, SIGNER).note(request_id))


@pytest.fixture
def held(database):
    insert_holds(database, make_hold(make_price(database)))
    return database


def test_a_request_that_failed_before_it_was_settled_is_counted_and_free(held):
    note(held, "r1")
    settle(held, make_end(1))
    [receipt] = receipts(held)
    assert (receipt["is_failed"], receipt["amount_nanousd"]) == (True, 0)
    assert receipt["completion_tokens"] == 5
    assert held.read_sync(lambda c: get_hold(c, "r1")).state == "posted"


def test_what_an_engine_ended_with_an_error_of_ours_is_failed_and_free(database):
    """A request is failed if its client got a 5xx, but not if it got a 400."""
    price, told = make_price(database), []
    for seq, (cause, num_tokens) in enumerate(product(get_args(StopCause), (0, 5)), 1):
        reason = "error" if cause in BROKEN or cause == "first_token_timeout" else "length"
        ended = {"finish_reason": reason, "stop_cause": cause, "num_completion_tokens": num_tokens}
        insert_holds(database, make_hold(price, f"r{seq}"))
        settle(database, make_end(seq, f"r{seq}", **ended))
        output = RequestOutput(request_id=f"r{seq}", seq=0, **ended)
        told.append(failure_of(MESSAGE, output, prompt_param="messages"))
    posted = receipts(database)
    assert len(posted) == len(told)
    for receipt, error in zip(posted, told, strict=True):
        assert receipt["is_failed"] == (error is not None and from_fault(error).status >= 500), (
            receipt
        )
        assert (receipt["amount_nanousd"] == 0) == (error is not None), receipt


def test_one_that_was_settled_already_is_reversed_once(held):
    settle(held, make_end(1))
    note(held, "r1")
    note(held, "r1")
    charged, reversal = receipts(held)
    assert charged["amount_nanousd"] > 0
    assert reversal["kind"] == "correction"
    assert reversal["reverses_entry_id"] == charged["entry_id"]
    assert charged["amount_nanousd"] + reversal["amount_nanousd"] == 0


def test_what_cost_nothing_is_not_reversed(held):
    settle(held, make_end(1, finish_reason="error", stop_cause="engine_failure"))
    note(held, "r1")
    assert len(receipts(held)) == 1


def test_a_failure_of_a_request_that_never_had_a_hold_is_nothing(held):
    note(held, "stranger")
    assert receipts(held) == []


def test_what_the_ledger_could_not_take_down_it_gets_when_it_is_back(held, monkeypatch):
    monkeypatch.setattr(failures, "_RETRY_S", 0)
    database = Away(held)

    async def run():
        noting = Failures(database, SIGNER)
        await noting.note("r1")
        trying = asyncio.create_task(noting.run())
        await asyncio.sleep(0)
        database.is_away = False
        while held.read_sync(lambda c: get_hold(c, "r1")).failed_at_ms is None:
            await asyncio.sleep(0)
        trying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trying

    asyncio.run(run())
    settle(held, make_end(1))
    assert receipts(held)[0]["is_failed"]


def test_no_more_than_a_bounded_number_is_remembered(sqlite_database, monkeypatch, caplog):
    monkeypatch.setattr(failures, "MAX_REMEMBERED", 2)

    async def run():
        noting = Failures(Away(sqlite_database), SIGNER)
        for name in ("a", "b", "c"):
            await noting.note(name)

    asyncio.run(run())
    assert "request a failed and will be billed" in caplog.text
