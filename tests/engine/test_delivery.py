"""A request's outputs reach their taker in order, and what goes wrong ends this request alone."""

import asyncio

import pytest

from engine.errors import (
    EngineAwayError,
    EngineDeadError,
    EngineProves,
    FirstTokenLate,
    RequestRefused,
)
from engine.wire.delivery import Delivery
from engine.wire.messages import LEAVING, PROVING, RequestOutput


def output(seq, **fields):
    return RequestOutput(request_id="r", seq=seq, **fields)


LAST = {"finish_reason": "length", "stop_cause": "max_tokens", "is_last": True}


def deliver(*outputs, take=None):
    """Hand the outputs over. Returns what was taken, and the delivery."""

    async def run():
        taken = []
        delivery = Delivery(take or taken.append)
        for each in outputs:
            delivery.hand(each)
        await delivery.ended
        return taken

    return asyncio.run(run())


def test_outputs_are_taken_in_order_to_the_last():
    sent = [output(0, new_token_ids=(5,)), output(1, new_token_ids=(6,), **LAST)]
    assert deliver(*sent) == sent


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ([output(1)], EngineDeadError),
        ([output(0), output(2)], EngineDeadError),
        ([output(0, finish_reason="error", error=LEAVING, is_last=True)], EngineAwayError),
        ([output(0, finish_reason="error", error=PROVING, is_last=True)], EngineProves),
        ([output(0, finish_reason="error", error="queue_full", is_last=True)], RequestRefused),
    ],
)
def test_a_gap_and_a_refusal_end_the_request(sent, error):
    with pytest.raises(error):
        deliver(*sent)


def test_nothing_is_taken_after_an_output_that_could_not_be():
    taken = []

    def take(each):
        taken.append(each.seq)
        raise KeyError("broken")

    with pytest.raises(KeyError):
        deliver(output(0), output(1), output(2, **LAST), take=take)
    assert taken == [0]


def test_only_a_request_without_a_token_is_late():
    async def run():
        for sent, is_late in (
            ([], True),
            ([output(0, prompt_logprobs=())], True),
            ([output(0)], False),  # a beam search has its first token
            ([output(0, new_token_ids=(5,))], False),
        ):
            delivery = Delivery([].append)
            for each in sent:
                delivery.hand(each)
            delivery.fail_unless_begun()
            assert delivery.ended.done() == is_late
            if is_late:
                with pytest.raises(FirstTokenLate):
                    await delivery.ended

    asyncio.run(run())
