"""The plan of a step: what its tokens cost, and what is given back."""

import pytest

from engine.scheduling.fairness import DECODE_COST
from engine.scheduling.step_plan import StepPlan
from tests.engine.fakes import make_message, make_scheduler


def planned(num_tokens, prompt_len=9, **state):
    """A plan in which a request of this state has so many tokens; the request, and the charges."""
    scheduler = make_scheduler(scheduling_policy="vtc")
    scheduler.add("gw", make_message(prompt_len=prompt_len))
    (request,) = scheduler.queues.waiting
    for name, value in state.items():
        setattr(request, name, value)
    plan = StepPlan(64, scheduler.policy)
    plan.add(request, num_tokens)
    return plan, request, scheduler.policy.counters


@pytest.mark.parametrize(
    ("num_tokens", "state", "charge"),
    [
        (4, {}, 4.0),
        (9, {}, 9 + DECODE_COST),
        (1, {"num_computed_tokens": 8}, 1 + DECODE_COST),  # the others are cached
        (9, {"num_charged_tokens": 5}, 4 + DECODE_COST),  # computed again
        (4, {"load_service": 50.0}, 54.0),
    ],
)
def test_new_tokens_and_a_load_are_charged_for_once(num_tokens, state, charge):
    plan, request, counters = planned(num_tokens, **state)
    assert counters["t1"] == charge
    assert (request.load_service, plan.budget) == (0.0, 64 - num_tokens)


def test_a_request_that_gives_way_pays_nothing():
    plan, request, counters = planned(5, num_charged_tokens=2)
    assert counters["t1"] == 3.0
    plan.refund(request)
    plan.remove(request)
    assert (counters["t1"], plan.budget, request.num_charged_tokens) == (0.0, 64, 2)
    assert not plan.tokens


def test_drafts_are_charged_for_like_a_prompt_and_take_their_places():
    plan, request, counters = planned(1, num_computed_tokens=9, output_token_ids=[7])
    plan.add_drafts(request, [1, 2, 3])
    assert (counters["t1"], plan.budget) == (DECODE_COST + 3, 64 - 1 - 3)
    plan.remove(request)
    assert (plan.budget, plan.drafts) == (64, {})
