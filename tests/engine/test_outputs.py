"""Outputs: the end of an answer, and tokens held back while they may belong to a stop string."""

from itertools import product

import numpy as np
import pytest

from engine.steps.batch import StepTokens
from engine.wire.messages import ExtendLease, LeaseLow, TokenLogprobs
from tests.engine.fakes import FakeClock, make_message, make_scheduler, update


def outputs_of(scheduler, token_ids):
    """The outputs of an answer that gets these tokens, one in each step."""
    results = [update(scheduler, scheduler.schedule(), StepTokens([t])) for t in token_ids]
    return [output for result in results for _, output in result.outputs]


@pytest.mark.parametrize("eos", [0, 77])
def test_eos_ends_a_request_unless_it_is_ignored(eos):
    """The model's own, and the request's."""
    for ignore, reason in ((False, "stop"), (True, None)):
        scheduler = make_scheduler()
        scheduler.add("gw", make_message(ignore_eos=ignore, eos_token_ids=(77,)))
        (output,) = outputs_of(scheduler, [eos])
        assert (output.finish_reason, output.stop_cause) == (reason, reason and "eos")


def test_eos_of_a_request_is_banned_and_masked_like_the_models():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(min_tokens=1, eos_token_ids=(77,)))
    assert set(scheduler.schedule().rows[0].banned_token_ids) == {0, 77}
    scheduler.add("gw", make_message("r2", eos_token_ids=(77,), grammar="quick"))
    request = scheduler.groups["r2"].requests[0]
    request.constraint = object()
    nothing, both = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
    both[0], both[9] = 1, 1 << 5
    only = np.where(both == both[0], both, 0).astype(np.uint8)
    found = [scheduler.outputs.masks(request, (), [mask])[0] for mask in (only, nothing)]
    assert [mask.tolist() for mask in found] == [both.tolist(), nothing.tolist()]


@pytest.mark.parametrize(("is_text", "num_stop_bytes"), [(False, 2), (True, 0)])
def test_a_stop_string_ends_the_request_and_says_how_much_text_to_cut(is_text, num_stop_bytes):
    scheduler = make_scheduler()
    message = make_message(stop=(b"BC", b"CD"), include_stop_str_in_output=is_text)
    scheduler.add("gw", message)
    finals = outputs_of(scheduler, b"ABCD")
    assert [o.new_token_ids for o in finals] == [(65,), (66, 67)]
    assert (finals[-1].stop_cause, finals[-1].num_stop_bytes) == ("stop_string", num_stop_bytes)
    assert finals[-1].num_completion_tokens == 3


def test_a_stop_string_is_found_in_the_bytes_that_a_request_gives_its_tokens():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(stop=(b"<x>C",), words=((65, b"a<"), (66, b"x>"), (68, b""))))
    (final,) = outputs_of(scheduler, b"ABDC")
    assert final.new_token_ids == tuple(b"ABDC")
    assert (final.stop_cause, final.num_stop_bytes) == ("stop_string", 4)


def test_a_stop_string_is_looked_for_behind_the_least_tokens():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(stop=(b"BC", b"D"), stop_token_ids=(9,), min_tokens=3))
    banned, outputs = [], []
    for token in b"BCDABC":
        batch = scheduler.schedule()
        banned.append(set(batch.rows[0].banned_token_ids))
        outputs += update(scheduler, batch, StepTokens([token])).outputs
    _, final = outputs[-1]
    assert (final.stop_cause, final.num_completion_tokens) == ("stop_string", 6)
    assert banned == [{0, 9}] * 3 + [set()] * 3


def test_an_answer_of_tokens_that_all_would_end_it_may_end_before_the_least_tokens():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(allowed_token_ids=(0, 9), stop_token_ids=(9,), min_tokens=3))
    assert scheduler.schedule().rows[0].banned_token_ids == ()


def test_a_stop_token_that_completes_a_stop_string_is_cut_like_one():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(stop=(b"B",), stop_token_ids=(66,)))
    (output,) = outputs_of(scheduler, [66])
    assert (output.stop_cause, output.num_stop_bytes) == ("stop_token", 1)


def test_drafts_behind_a_pending_token_end_no_answer_whatever_that_token_is():
    scheduler = make_scheduler()
    scheduler.add(
        "gw", make_message(max_tokens=6, stop=(b"BC", b"AAB"), stop_token_ids=(ord("D"),))
    )
    outputs_of(scheduler, b"A")
    scheduler.schedule()  # whose token is pending
    (request,) = scheduler.queues.running
    most = 0
    for drafts in product(b"ABCDE", repeat=5):
        kept = scheduler.outputs.before_end(request, drafts)
        most = max(most, len(kept))
        assert ord("D") not in kept
        for pending in b"ABCE":
            matcher = request.stops.copy()
            said = (pending, *kept[1:])
            ends = [matcher.push(token, bytes([token]))[1] is not None for token in said]
            assert ends[0] or not any(ends), "it may end by the pending token only"
    assert most == 4, "of six tokens one is known, and the last one is not drafted"


def test_logprobs_leave_with_their_tokens_and_what_was_held_back_with_the_end():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(stop=(b"BC",), logprobs=0, max_tokens=4))
    outputs = []
    for number, token in enumerate(b"ABAB"):
        named = {0: [TokenLogprobs(logprob=-float(number))]}
        result = update(scheduler, scheduler.schedule(), StepTokens([token], named))
        outputs += [output for _, output in result.outputs]
    assert [o.new_token_ids for o in outputs] == [(65,), (66, 65), (66,)]
    assert [[entry.logprob for entry in o.logprobs] for o in outputs] == [
        [0.0],
        [-1.0, -2.0],
        [-3.0],
    ]


def run_leased(scheduler, num_tokens):
    """Run until an answer has so many tokens; the tokens at which its lease was said to be low."""
    low: list[LeaseLow] = []
    [request] = scheduler.groups["r1"].requests
    while len(request.output_token_ids) < num_tokens:
        result = update(scheduler, scheduler.schedule(), StepTokens([7]))
        low += [message for _, message in result.leases_low]
    return [message.num_completion_tokens for message in low]


def test_a_low_lease_is_announced_once_and_a_short_one_at_the_first_token():
    scheduler = make_scheduler(max_model_len=512)
    scheduler.add("gw", make_message(max_tokens=200, token_lease=70))
    assert run_leased(scheduler, 20) == [6]
    scheduler.extend_lease(ExtendLease(request_id="r1", token_lease=100))
    assert run_leased(scheduler, 40) == [36]
    scheduler.extend_lease(ExtendLease(request_id="r1", token_lease=102))
    assert run_leased(scheduler, 102) == [41]
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(max_tokens=200, token_lease=3))
    assert run_leased(scheduler, 3) == [1]


def test_an_answer_waits_at_the_end_of_its_lease_and_goes_on_if_it_grows_in_time():
    clock = FakeClock()
    scheduler = make_scheduler(clock=clock)
    scheduler.add("gw", make_message(max_tokens=9, token_lease=3))
    run_leased(scheduler, 3)
    clock.now += 1.9
    assert scheduler.schedule().is_empty, "what is not paid for is not computed"
    scheduler.extend_lease(ExtendLease(request_id="r1", token_lease=5))
    run_leased(scheduler, 5)
    clock.now += 1.9
    assert scheduler.schedule().is_empty
    scheduler.check_integrity()
    clock.now += 0.2
    [ended] = update(scheduler, scheduler.schedule(), StepTokens([])).ended
    assert (ended.decisive.stop_cause, len(ended.output_token_ids)) == ("budget", 5)
    assert not scheduler.has_work


def test_an_answer_that_waits_for_its_lease_is_preempted_and_goes_on_where_it_was():
    scheduler = make_scheduler()
    scheduler.add("gw", make_message(max_tokens=9, token_lease=3))
    run_leased(scheduler, 3)
    [request] = scheduler.groups["r1"].requests
    scheduler.queues.preempt([request])
    assert scheduler.schedule().is_empty
    scheduler.extend_lease(ExtendLease(request_id="r1", token_lease=5))
    assert run_leased(scheduler, 5) == [4]


def test_a_request_past_its_deadline_is_ended():
    clock = FakeClock()
    scheduler = make_scheduler(clock=clock)
    scheduler.add("gw", make_message(deadline_s=5.0))
    clock.now += 5.0
    (output,) = outputs_of(scheduler, [7])
    assert output.stop_cause == "deadline"
