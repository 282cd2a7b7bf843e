"""Outputs of a request are handed on in order, kept until somebody follows, and end with it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.messages import RequestOutput
from server.inference.output_stream import OutputStream


def said(number):
    return RequestOutput("r", number, new_token_ids=(number,))


class Run:
    """A request that says the tokens from 0 on. error: ends it."""

    def __init__(self, count=3, error=None):
        self.count, self.error, self.num_said, self.was_cancelled = count, error, 0, False

    async def __call__(self, take):
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                self.num_said += 1
                take(said(number))
            if self.error:
                raise self.error
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


@given(st.integers(1, 6), st.integers(0, 9), st.booleans())
async def test_who_follows_gets_every_output_once_and_in_order_however_late(
    count, wait, asks_first
):
    outputs, taken = OutputStream(Run(count)), []
    if asks_first:
        assert await outputs.first() == said(0)
    for _ in range(wait):
        await asyncio.sleep(0)
    outputs.follow(taken.append)
    await outputs.end()
    assert taken == [said(number) for number in range(count)]


async def test_a_request_that_fails_before_its_first_output_raises_there():
    with pytest.raises(ValueError, match="late"):
        await OutputStream(Run(0, ValueError("late"))).first()


async def test_logprobs_of_the_prompt_begin_no_answer_which_may_still_be_late():
    scored = [RequestOutput("r", seq, prompt_logprobs=()) for seq in range(2)]

    async def run(take):
        for output in scored:
            take(output)
            await asyncio.sleep(0)
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        await OutputStream(run).first()


async def test_a_request_that_fails_later_raises_at_the_end():
    outputs, taken = OutputStream(Run(2, ValueError("broken"))), []
    await outputs.first()
    outputs.follow(taken.append)
    with pytest.raises(ValueError, match="broken"):
        await outputs.end()
    assert taken == [said(0), said(1)]


def test_an_output_that_cannot_be_taken_ends_the_request():
    async def run():
        work = Run(5)
        outputs = OutputStream(work)
        await outputs.first()
        outputs.follow([].index)  # nothing is in an empty list
        with pytest.raises(ValueError, match="not in list"):
            await outputs.end()
        assert work.num_said == 2

    with pytest.raises(ValueError, match="not in list"):
        asyncio.run(run())  # the first output was kept, and is refused at once


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_who_leaves_ends_the_request(is_waiting):
    work = Run(10**9)
    outputs = OutputStream(work)
    if is_waiting:
        work.count = 0
        outputs = OutputStream(lambda _: asyncio.Event().wait())
        waiting = asyncio.create_task(outputs.first())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        await outputs.first()
        await outputs.aclose()
        assert work.was_cancelled
    with pytest.raises(asyncio.CancelledError):
        await outputs.end()
