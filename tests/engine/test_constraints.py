"""Constraints: whose grammar delays or fails whom, and what is kept of compiled grammars."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from engine.grammar.compilation import Compilation
from engine.grammar.constraint import Constraint, without
from engine.grammar.constraints import Constraints
from engine.grammar.lane import Lane
from engine.grammar.lanes import Lanes
from engine.grammar.matcher import ConstraintFailed
from engine.wire.messages import ExtendLease
from tests.engine.fakes import (
    EOS,
    FakeGrammars,
    FakeMatcher,
    expected_tokens,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_of,
)


class Script:
    """A grammar whose masks are given, one after the other; the last one repeats.

    entries: token ids, or a function that gives them.
    """

    def __init__(self, *entries):
        self.entries, self.place = entries, 0

    def compile(self, text):
        return self

    def fork(self):
        return Script(*self.entries)

    def consume(self, token_ids):
        self.place += len(token_ids)

    def mask(self):
        entry = self.entries[min(self.place, len(self.entries) - 1)]
        bits = np.zeros(256, dtype=np.uint8)
        bits[list(entry() if callable(entry) else entry)] = 1
        return np.packbits(bits, bitorder="little")


@pytest.fixture
def patient(monkeypatch):
    """Steps wait for masks, so that their number does not depend on this machine's load."""
    monkeypatch.setattr("engine.scheduling.forced._LEAST_PATIENCE_S", 60.0)


def make_core_of(grammars, folder, lag=0, **limits):
    core = make_core(folder, make_scheduler(**limits), lag)
    core.scheduler.constraints._grammars = grammars
    return core


def run_slowly(core, outputs, until):
    """Step as the engine's process does until `until()`, and collect outputs by request."""
    deadline = time.monotonic() + 60.0
    while not until():
        assert time.monotonic() < deadline, "it never came"
        for _, message in core.step():
            for output in getattr(message, "outputs", ()):  # a low lease has none
                outputs.setdefault(output.request_id, []).append(output)
        assert not core.scheduler.outputs.result.progress, "a step keeps tokens back"
        time.sleep(1e-4)


@pytest.mark.parametrize("lag", [0, 1])
def test_forced_tokens_take_no_step_of_their_own_and_are_metered_like_others(
    tmp_path, lag, patient
):
    script = Script([5, 6], [7], [8], [9], range(1, 200), [11], [EOS])
    core = make_core_of(script, tmp_path, lag, scheduling_policy="vtc")
    outputs = {}
    core.handle("gw", make_message("r", prompt_len=9, max_tokens=50, grammar="g"))
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    answer = outputs["r"]
    assert tokens_of(answer)[1:4] + tokens_of(answer)[5:] == [7, 8, 9, 11, EOS]
    assert (answer[-1].finish_reason, answer[-1].stop_cause) == ("stop", "eos")
    assert core.runner.meter.sampled_tokens == answer[-1].num_completion_tokens == 7
    assert core.scheduler.constraints.lanes.figures.forced_tokens == 5
    assert [len(o.new_token_ids) for o in answer if o.new_token_ids] == [1, 3, 1, 2]
    # Of 9 prompt tokens, 5 forced ones, and a row of each step that chose a token or was too early.
    assert core.scheduler.policy.counters == {"t1": 9 + 5 + 2 * core.num_steps}


@pytest.mark.parametrize("lag", [0, 1])
def test_an_answer_that_a_grammar_forces_waits_at_its_lease_and_goes_on_there(
    tmp_path, lag, patient
):
    script = Script([5, 6], [7], [8], [9], range(1, 200), [11], [EOS])
    core = make_core_of(script, tmp_path, lag)
    outputs, told = {}, []
    core.handle("gw", make_message("r", max_tokens=50, token_lease=3, grammar="g"))
    for lease in (3, 5, 50):
        core.handle("gw", ExtendLease(request_id="r", token_lease=lease))
        num_tokens = min(lease, 7)
        run_slowly(core, outputs, lambda n=num_tokens: n <= len(tokens_of(outputs.get("r", []))))
        for _ in range(9):
            assert not core.step(), "what is not paid for is not computed"
        told.append(tokens_of(outputs["r"]))
    assert [len(tokens) for tokens in told] == [3, 5, 7]
    assert told[-1][1:4] + told[-1][5:] == [7, 8, 9, 11, EOS]
    assert outputs["r"][-1].stop_cause == "eos"


def test_where_logprobs_are_wanted_the_model_is_asked_for_forced_tokens_too(tmp_path):
    core = make_core_of(Script([5], [6], [7], [EOS]), tmp_path)
    outputs = {}
    core.handle("gw", make_message("r", max_tokens=50, grammar="g", logprobs=1))
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    assert tokens_of(outputs["r"]) == [5, 6, 7, EOS]
    assert len([told for o in outputs["r"] for told in o.logprobs]) == 4
    assert core.scheduler.constraints.lanes.figures.forced_tokens == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_mask_that_does_not_come_holds_up_its_own_answer_only(tmp_path, lag):
    gate = threading.Event()

    def stalled():
        gate.wait()
        return [9]

    core = make_core_of(Script([5, 6], stalled, [EOS]), tmp_path, lag)
    outputs = {}
    core.handle("gw", make_message("stalled", max_tokens=8, grammar="g", tenant_id="t2"))
    run_slowly(core, outputs, lambda: "stalled" in outputs)
    free = make_message("free", max_tokens=40)
    core.handle("gw", free)
    run_slowly(core, outputs, lambda: outputs.get("free") and outputs["free"][-1].is_last)
    assert tokens_of(outputs["free"]) == expected_tokens(free)
    assert len(tokens_of(outputs["stalled"])) == 1
    gate.set()
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    assert tokens_of(outputs["stalled"])[1:] == [9, EOS]
    assert core.scheduler.constraints.lanes.figures.masks_late > 0


def test_a_mask_that_is_a_little_late_is_waited_for():
    gate = threading.Event()

    class Awaited(threading.Event):
        def wait(self, timeout):
            if timeout > 0.0:
                gate.set()
            return super().wait(timeout)

    compilation = Compilation("t", "g")
    compilation.matcher = Script(lambda: gate.wait() and [5, 6])
    constraint = Constraint(compilation, Lanes(), [EOS])
    constraint._is_known = Awaited()
    assert constraint.wait(time.monotonic()) is None
    assert constraint.wait(time.monotonic() + 60.0) is not None


@pytest.mark.parametrize("lag", [0, 1])
def test_a_row_whose_grammar_is_slow_is_in_no_step_before_its_mask_is_there(
    tmp_path, lag, patient, monkeypatch
):
    monkeypatch.setattr("engine.grammar.compilation.SLOW_S", 0.0)
    core = make_core_of(FakeGrammars(), tmp_path, lag)
    message = make_message("r", max_tokens=30, grammar="slow")
    outputs = {}
    core.handle("gw", message)
    core.handle("gw", free := make_message("free", max_tokens=60))
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    assert tokens_of(outputs["r"]) == expected_tokens(message)
    assert tokens_of(outputs["free"]) == expected_tokens(free)
    assert core.scheduler.constraints.lanes.figures.masks_late == 0


def test_a_grammar_that_is_being_compiled_holds_up_its_own_requests_only(tmp_path):
    gate = threading.Event()

    class Slow(FakeGrammars):
        def compile(self, text):
            gate.wait()
            return super().compile(text)

    core = make_core_of(Slow(), tmp_path)
    outputs = {}
    waiting = make_message("waiting", grammar="quick", tenant_id="t2")
    core.handle("gw", waiting)
    free = make_message("free", max_tokens=20)
    core.handle("gw", free)
    run_slowly(core, outputs, lambda: outputs.get("free") and outputs["free"][-1].is_last)
    assert "waiting" not in outputs
    gate.set()
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    assert tokens_of(outputs["waiting"]) == expected_tokens(waiting)


def test_what_cannot_be_compiled_fails_alone_and_has_computed_nothing(tmp_path):
    core = make_core_of(FakeGrammars(), tmp_path)
    outputs = {}
    for number, grammar in enumerate(["bomb", "quick"]):
        core.handle("gw", make_message(f"r{number}", grammar=grammar))
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    (refused,) = outputs["r0"]
    assert (refused.finish_reason, refused.stop_cause) == ("error", "constraint_too_slow")
    assert (refused.num_prompt_tokens, refused.num_completion_tokens) == (0, 0)
    assert outputs["r1"][-1].finish_reason == "length"
    assert core.take_stats().grammars.compiles_failed == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_a_mask_over_its_budget_fails_its_request_alone(tmp_path, lag, monkeypatch):
    def too_much():
        raise ConstraintFailed("too many items")

    core = make_core_of(Script([5, 6], [5, 6], too_much), tmp_path, lag)
    outputs = {}
    free = make_message("free", max_tokens=30)
    core.handle("gw", free)
    core.handle("gw", make_message("r", max_tokens=30, grammar="g", n=2))
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    assert {(o.finish_reason, o.stop_cause) for o in outputs["r"] if o.finish_reason} == {
        ("error", "constraint_too_slow")
    }
    assert tokens_of(outputs["free"]) == expected_tokens(free)
    core.scheduler.check_integrity()


def test_without_a_grammar_library_a_grammar_is_refused_and_the_rest_is_served(tmp_path):
    core = make_core_of(None, tmp_path)
    ((_, answer),) = core.handle("gw", make_message("r0", grammar="g"))
    assert answer.outputs[0].error == "no_grammars"
    core.handle("gw", free := make_message("r1"))
    assert tokens_of(run_until_idle(core)["r1"]) == expected_tokens(free)


def test_tenants_take_turns_on_a_lane_one_job_each():
    lane, order, gate, done = Lane("test"), [], threading.Event(), threading.Event()
    lane.submit("first", gate.wait)
    for number in range(3):
        lane.submit("a", lambda number=number: order.append(f"a{number}"))
    lane.submit("b", lambda: order.append("b0"))
    lane.submit("c", done.set)
    gate.set()
    assert done.wait(60)
    deadline = time.monotonic() + 60
    while len(order) < 4 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert order == ["a0", "b0", "a1", "a2"]


def test_a_lane_whose_thread_has_ended_begins_another(monkeypatch):
    monkeypatch.setattr("engine.grammar.lane._IDLE_S", 0.0)
    lane, done = Lane("test"), threading.Event()
    for _ in range(20):
        done.clear()
        lane.submit("t", done.set)
        assert done.wait(60)


def wanted(constraints, tenant_id, text):
    """A tenant's grammar, once it is compiled."""
    compilation = constraints.want(tenant_id, text)
    deadline = time.monotonic() + 60
    while compilation.matcher is None and time.monotonic() < deadline:
        time.sleep(1e-4)
    assert compilation.matcher is not None
    return compilation


def test_a_grammar_is_compiled_once_for_a_tenant_and_again_for_another():
    constraints = Constraints(FakeGrammars())
    first = wanted(constraints, "a", "quick")
    assert constraints.want("a", "quick") is first
    assert wanted(constraints, "b", "quick") is not first
    assert constraints.lanes.figures.compiles == 2


def at_once(compilation):
    """A compilation as if it had taken no time, by which its memory is estimated."""
    compilation.compile_s = 0.0
    return compilation


def test_a_tenant_has_a_share_of_the_kept_grammars_and_pushes_out_its_own():
    size = Compilation("t", "quick 0").size_bytes
    constraints = Constraints(FakeGrammars(), most_bytes=8 * size + 100)
    others, *own = [
        at_once(wanted(constraints, tenant_id, text))
        for tenant_id, text in (("b", "quick"), *(("a", f"quick {number}") for number in range(3)))
    ]
    assert constraints.want("b", "quick") is others
    assert constraints.want("a", "quick 2") is own[2]
    assert constraints.want("a", "quick 0") is not own[0], "two of eight are the tenant's share"


def test_slow_grammars_use_the_slow_lane_until_they_are_quick_again():
    compilation = Compilation("t", "quick")
    compilation.matcher = FakeMatcher("quick")
    compilation.note(5e-3)
    assert compilation.is_slow
    constraint = Constraint(compilation, Lanes(), [EOS])
    assert constraint.must_wait(num_pending_tokens=1)
    for _ in range(20):
        compilation.note(1e-5)
    assert not compilation.is_slow
    assert not constraint.must_wait(num_pending_tokens=1)


def test_eos_is_ignored_as_long_as_anything_else_may_follow():
    mask = FakeMatcher("quick").mask()
    everything = np.full_like(mask, 255)
    assert not without(everything, {EOS})[0] & 1
    only_eos = np.zeros_like(mask)
    only_eos[0] = 1
    assert without(only_eos, {EOS, 7}) is only_eos


def test_a_grammar_that_is_over_ends_the_answer_whatever_the_parameters_say(tmp_path):
    core = make_core_of(Script([EOS, 5], [EOS, 6], [EOS]), tmp_path)
    message = make_message("r", max_tokens=50, grammar="g", ignore_eos=True)
    outputs = {}
    core.handle("gw", message)
    least = replace(message.sampling_params, ignore_eos=False, min_tokens=20)
    core.handle("gw", replace(message, request_id="least", sampling_params=least))
    run_slowly(core, outputs, lambda: not core.scheduler.has_work)
    for answer in outputs.values():
        assert tokens_of(answer) == [5, 6, EOS]
        assert answer[-1].stop_cause == "eos"
