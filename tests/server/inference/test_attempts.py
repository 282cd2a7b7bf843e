"""The rules of attempts: how each ended, means and ids."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.messages import RequestOutput, TokenLogprobs
from registry.catalog.names import model_not_found
from registry.errors import Failed, Overloaded, QuotaExceeded
from server.inference import errors
from server.inference.attempts import (
    Outcome,
    attempt_ids,
    least_mean_logprob,
    outcome_of,
    parent_of,
)
from server.limits.rules import Limit, RateLimited


def test_no_attempt_follows_an_answer_or_the_callers_own_end() -> None:
    assert {each for each in Outcome if each.is_end} == {"answered", "refused", "timed_out"}


def limited(scope: str) -> RateLimited:
    return RateLimited(Limit("requests", scope, "x", 1), retry_after_ms=1, standings=())


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Overloaded(), "overloaded"),
        (errors.first_token_timeout(5), "late"),
        (errors.engine_unavailable(), "unavailable"),
        (errors.draining(), "unavailable"),
        (errors.adapter_loading(), "unavailable"),
        (errors.metering_unavailable(), "unavailable"),
        (limited("adapter"), "limited"),
        (model_not_found("gone"), "missing"),
        (errors.failed("adapter_missing"), "missing"),
        (errors.failed("adapter_corrupt"), "missing"),
        (errors.failed("adapter_incompatible"), "missing"),
        (errors.failed("adapter_too_large"), "missing"),
        (errors.failed("request_too_long"), "missing"),
        (Failed(), "failed"),
        (errors.request_timeout(9), "timed_out"),
        (limited("tenant"), "refused"),
        (limited("key"), "refused"),
        (errors.queue_share_exceeded(3, 1, 3, retry_after_s=1), "refused"),
        (QuotaExceeded("the budget"), "refused"),
        (errors.context_length_exceeded(limit=1, at_least=2, param="messages"), "refused"),
        (errors.failed("adapter_not_invoked"), "refused"),
        (errors.request_suspected(None), "refused"),
        (errors.request_suspected(2.0), "unavailable"),
        (errors.failed("constraint_too_slow"), "refused"),
        (RuntimeError("a bug"), "refused"),
    ],
)
def test_what_is_the_models_fault_is_told_from_what_is_the_callers(error, outcome) -> None:
    assert outcome_of(error) == outcome


def said(index: int, *logprobs: float) -> RequestOutput:
    named = tuple(TokenLogprobs(logprob=each) for each in logprobs)
    return RequestOutput(
        request_id="r", seq=0, index=index, new_token_ids=(1,) * len(named), logprobs=named
    )


_LOGPROB = st.floats(min_value=-50, max_value=0)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(_LOGPROB, max_size=4)), max_size=9))
def test_the_least_mean_over_all_tokens_of_an_answer_counts(steps) -> None:
    tokens = {index: [t for i, ts in steps if i == index for t in ts] for index, _ in steps}
    means = [sum(each) / len(each) for each in tokens.values() if each]
    found = least_mean_logprob([said(index, *logprobs) for index, logprobs in steps])
    assert math.isclose(found, min(means, default=0.0), abs_tol=1e-9)


def test_a_token_that_was_impossible_makes_an_answer_weak() -> None:
    assert least_mean_logprob([said(0, -0.1, -math.inf)]) < -1e100
    assert least_mean_logprob([said(0)]) == 0


def test_attempts_know_their_parent_and_other_requests_have_none() -> None:
    assert {parent_of(each) for each in attempt_ids("abc")} == {"abc"}
    assert len(set(attempt_ids("abc"))) == 8
    assert [parent_of(each) for each in ("abc", "abc.", "abc.0", "abc.9", "abc.11")] == [None] * 5
