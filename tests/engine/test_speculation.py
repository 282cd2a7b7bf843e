"""Drafts are verified where they bring more tokens a second, and where no other tenant waits."""

from collections import deque

import pytest

from engine.drafts.acceptance import Acceptance
from engine.drafts.estimate import StepEstimate
from engine.drafts.ngrams import BY_MODEL, Draft
from engine.drafts.speculation import MOST_DRAFTS, Speculation, _Record
from engine.grammar.constraint import Constraint
from engine.steps.batch import Batch
from engine.steps.curve import StepCurve
from engine.steps.measurement import DEVICE_SIZES, SIZES, measure_steps, steps_of
from engine.steps.meter import TokenMeter
from tests.engine.fakes import (
    LAYOUT,
    FakeClock,
    FakeDrafter,
    FakeRunner,
    expected_tokens,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_for,
    tokens_of,
    update,
)

BOUND_BY_BYTES = StepCurve(((1, 1.0), (8, 1.0), (16, 2.0)))
"""Eight tokens take as long as one; from there on each costs the same."""
FULL = StepCurve(((1, 1.0), (2, 2.0)))
FREE = StepCurve(((1, 1.0), (64, 1.0)))


class CertainDrafter:
    """Drafts seven tokens, as a long match would, for requests of `tenants` (None: of all)."""

    def __init__(self, tenants=None):
        self.tenants = tenants

    def drafts(self, requests, most):
        drafting = [r for r in requests if self.tenants is None or r.tenant_id in self.tenants]
        return dict.fromkeys(drafting, Draft((5,) * most, 32))

    def end(self, request):
        pass


def decoding(*tenants, curve=BOUND_BY_BYTES, drafter=None, speculation=None, is_pending=False):
    """Drafts per tenant of a step in which each of these tenants has an answer under way.

    is_pending: whether the step before has still to choose the answers' last tokens.
    """
    scheduler = make_scheduler(max_num_seqs=64, max_num_batched_tokens=128)
    for i, tenant_id in enumerate(tenants):
        message = make_message(f"r{i}", 4, tenant_id=tenant_id, max_tokens=90)
        scheduler.add("gw", message)
    batch = scheduler.schedule()
    plan = {}
    for request in scheduler.queues.running:
        request.output_token_ids.append(7)
        request.num_computed_tokens = len(request.prompt.token_ids)
        request.num_in_flight_tokens = request.num_pending_tokens = int(is_pending)
        plan[request] = 1
    assert len(plan) == len(batch.rows) == len(tenants)
    speculation = speculation or Speculation(curve, drafter or CertainDrafter())
    drafts = speculation.choose(plan, 100, scheduler.outputs.before_end)
    return {request.tenant_id: len(tokens) for request, tokens in drafts.items()}


def choose_alone(speculation):
    """How many drafts a lone answer has."""
    return decoding("a", speculation=speculation).get("a", 0)


def test_a_lone_answer_fills_the_step_that_costs_nothing_more():
    assert decoding("a") == {"a": MOST_DRAFTS}


def test_answers_share_the_room_that_costs_nothing():
    counts = decoding("a", "b", "c", "d")
    assert sum(counts.values()) == 4
    assert set(counts.values()) == {1}


def test_a_full_step_has_no_drafts():
    assert decoding(*(f"t{i}" for i in range(16))) == {}
    assert decoding("a", curve=FULL) == {}


def test_nobody_waits_for_the_drafts_of_another_tenant():
    curve = StepCurve(((1, 1.0), (2, 1.0), (16, 1.7)))
    alone = decoding("a", curve=curve, drafter=CertainDrafter({"a"}))
    beside = decoding("a", "b", curve=curve, drafter=CertainDrafter({"a"}))
    assert alone["a"] == MOST_DRAFTS
    assert 0 < beside["a"] <= 2  # a tenth of the time more
    assert decoding("a", "b", curve=curve)["a"] > 2


def test_a_request_may_want_one_token_a_step(tmp_path):
    core = make_core(tmp_path, make_scheduler(drafter=FakeDrafter(share_wrong=0.0)))
    messages = [make_message(f"r{i}", max_tokens=30, drafts=not i) for i in range(2)]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    assert [tokens_of(outputs[m.request_id]) for m in messages] == list(
        map(expected_tokens, messages)
    )
    assert any(len(o.new_token_ids) > 1 for o in outputs["r0"])
    assert all(len(o.new_token_ids) <= 1 for o in outputs["r1"])
    assert outputs["r1"][-1].num_accepted_tokens == 0


@pytest.mark.parametrize(
    "limits",
    [{}, {"stop": 11}, {"stop_token_ids": 12}, {"min_tokens": 17}, {"token_lease": 13}],
)
@pytest.mark.parametrize("share_wrong", [0.0, 0.2])
@pytest.mark.parametrize("lag", [0, 1])
def test_no_step_chooses_a_token_that_the_answer_has_no_place_for(
    tmp_path, limits, share_wrong, lag
):
    """The runner's meter has counted as many tokens as the answer has, wherever it ends.

    With a lag, a step that was launched before it was known that a pending token ends the answer
    has chosen one in vain.
    """
    said = expected_tokens(make_message(max_tokens=40))
    at = {
        "stop": lambda i: (bytes(said[i : i + 2]),),
        "stop_token_ids": lambda i: (said[i],),
        "min_tokens": lambda i: i,
        "token_lease": lambda i: i,
    }
    sampling = {name: at[name](place) for name, place in limits.items()}
    drafter = FakeDrafter(seed=3, share_wrong=share_wrong)
    core = make_core(tmp_path, make_scheduler(drafter=drafter), lag)
    core.handle("gw", make_message(max_tokens=40, **sampling))
    outputs = run_until_idle(core)["r1"]
    tokens = tokens_of(outputs)
    assert tokens == said[: len(tokens)]
    ends = {"stop": 13, "stop_token_ids": 13, "token_lease": 13}
    assert len(tokens) == ends.get(next(iter(limits), ""), 40)
    num_vain = TokenMeter.read(tmp_path / "meter")[1] - len(tokens)
    assert num_vain == 0 or lag and num_vain == 1 and limits.keys() & {"stop", "stop_token_ids"}
    assert core.num_completion_tokens == len(tokens)
    accepted = outputs[-1].num_accepted_tokens
    assert core.take_stats().drafts.accepted_tokens == accepted > 0
    drafted = core.take_stats().drafts.drafted_tokens
    assert outputs[-1].num_rejected_tokens == drafted - accepted


def test_blocks_behind_rejected_drafts_are_given_back(tmp_path):
    core = make_core(tmp_path, make_scheduler(drafter=FakeDrafter(share_wrong=1.0)))
    core.handle("gw", make_message(prompt_len=15, max_tokens=30))
    while core.scheduler.has_work:
        core.step()
        for request in core.scheduler.queues.running:
            assert len(request.block_ids) == LAYOUT.num_blocks(request.num_tokens)


class TimedRunner(FakeRunner):
    """A device of its own time: steps take what a curve says, one behind the other, and the host
    takes a while to launch each. Only `collect` waits.
    """

    def __init__(self, meter, clock, curve, host_s):
        super().__init__(meter, lag=1)
        self.clock, self.curve, self.host_s = clock, curve, host_s
        self.ends = deque()
        self.free_at = 0.0

    def launch(self, batch):
        super().launch(batch)
        self.clock.now += self.host_s
        self.free_at = max(self.free_at, self.clock.now) + self.curve.seconds(batch.num_tokens)
        self.ends.append(self.free_at)

    def collect(self):
        self.clock.now = max(self.clock.now, self.ends.popleft())
        return super().collect()


GPU = StepCurve(((1, 5.0e-3), (64, 5.4e-3), (128, 6.2e-3), (256, 9.0e-3)))
"""A GPU's curve as it may be: it reads 15 GB in 5 ms, and has arithmetic for 250 tokens then."""


def seconds_of(folder, num_answers, share_wrong, has_drafts, curve=GPU, host_s=1e-3, max_tokens=60):
    """Seconds that a device takes for answers, and the tokens that it drafted."""
    folder.mkdir()
    clock, drafter = FakeClock(0.0), FakeDrafter(1, share_wrong, is_brief=False)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    speculation = Speculation(curve, drafter, lag=1, most_choices=256)
    scheduler = make_scheduler(1000, clock=clock, speculate=lambda *_: speculation, **limits)
    core = make_core(folder, scheduler, lag=1)
    core.runner = TimedRunner(core.runner.meter, clock, curve, host_s)
    fields = {"max_tokens": max_tokens, "drafts": has_drafts}
    messages = [make_message(f"r{i}", **fields) for i in range(num_answers)]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    for message in messages:
        assert tokens_of(outputs[message.request_id]) == expected_tokens(message)
    return clock.now, speculation.figures().drafted_tokens


def test_a_step_behind_a_row_with_drafts_is_missed_in_the_next_step():
    """An answer needs more than one accepted draft in two steps beside others, any gain alone."""
    alone = Speculation(GPU, CertainDrafter(), lag=1, most_choices=2)
    assert choose_alone(alone) == 1
    beside = Speculation(GPU, CertainDrafter(), lag=1, most_choices=4)
    assert decoding("a", "b", "c", speculation=beside) == {}, "there is place for one draft"
    away = Speculation(GPU, CertainDrafter(), lag=1, most_choices=9)
    assert decoding("a", "b", speculation=away).keys() == {"a", "b"}
    away._most_choices = 2
    assert choose_alone(away) == 0, "those two are back in the next step"
    assert choose_alone(away) == 1


def test_behind_a_pending_token_each_draft_is_less_likely_by_the_guess_at_it():
    curve = StepCurve(((1, 1.0), (2, 1.6)))  # a draft is taken from a chance of 0.76 on
    for is_pending, expected in ((False, {"a": 1}), (True, {})):
        speculation = Speculation(curve, CertainDrafter(), lag=1, most_choices=2)
        assert decoding("a", speculation=speculation, is_pending=is_pending) == expected


def test_a_guess_at_a_pending_token_takes_no_drafts_place():
    for is_pending in (False, True):
        speculation = Speculation(FREE, CertainDrafter(), lag=1, most_choices=99)
        drafts = decoding("a", speculation=speculation, is_pending=is_pending)
        assert drafts == {"a": MOST_DRAFTS}


@pytest.mark.parametrize(("said", "expected"), [(5, (3, 2)), (6, (3, 0))])
def test_a_guess_at_a_pending_token_is_learned_from_like_a_draft(said, expected):
    """The answer got `said` where 5 was guessed, and one of two drafts was accepted."""
    scheduler = make_scheduler()
    speculation, acceptance = Speculation(FULL, CertainDrafter(), lag=1), Acceptance()
    scheduler.add("gw", make_message())
    scheduler.schedule()
    (request,) = scheduler.queues.running
    speculation._records[request] = _Record(match=32, guess=5)
    request.output_token_ids.append(said)
    speculation.note(request, 2, 1)
    acceptance.note(32, *expected)
    assert speculation._records[request].acceptance.chance(32) == acceptance.chance(32)
    figures = speculation.figures()
    assert (figures.drafted_tokens, figures.accepted_tokens) == (2, 1)


@pytest.mark.parametrize("lag", [0, 1])
def test_masks_behind_drafts_are_looked_for_once(tmp_path, monkeypatch, lag):
    """Behind a pending token, when it is known."""
    monkeypatch.setattr("engine.scheduling.forced._LEAST_PATIENCE_S", 60.0)
    looked, launched, look_ahead = [], [], Constraint.look_ahead

    def note(constraint, drafts):
        looked.append(tuple(drafts))
        look_ahead(constraint, drafts)

    monkeypatch.setattr(Constraint, "look_ahead", note)
    core = make_core(tmp_path, make_scheduler(drafter=FakeDrafter(3, 0.2)), lag)
    core.handle("gw", make_message(max_tokens=40, grammar="quick"))
    while core.scheduler.has_work:
        core.step()
        launched += [row.draft_token_ids for row in core.runner.newest.rows if row.num_drafts]
        core.runner.newest = Batch(0, ())
    assert looked == launched != []


@pytest.mark.parametrize(
    ("num_answers", "share_wrong", "least_gain", "device"),
    [
        (1, 0.0, 4.5, {}),
        (16, 0.2, 2.0, {}),
        (64, 0.0, 1.8, {}),
        (64, 0.4, 0.95, {}),  # 0.75 if a step were weighed without the one behind it
        (16, 1.0, 0.94, {}),
        (1, 0.6, 0.9, {"host_s": 5e-3}),  # it waits for the host as long as for the device
    ],
)
def test_a_step_behind_drafts_are_made_where_they_pay(
    tmp_path, num_answers, share_wrong, least_gain, device
):
    plain_s, _ = seconds_of(tmp_path / "plain", num_answers, share_wrong, False, **device)
    drafts_s, drafted = seconds_of(tmp_path / "drafts", num_answers, share_wrong, True, **device)
    assert drafted > 0
    assert plain_s / drafts_s > least_gain


def test_a_step_behind_none_are_made_where_they_cannot_pay(tmp_path):
    steep = StepCurve(((1, 1e-3), (2, 2e-3)))
    assert seconds_of(tmp_path / "many", 200, 0.0, True, max_tokens=9)[1] == 0
    assert seconds_of(tmp_path / "steep", 4, 0.0, True, curve=steep)[1] == 0


def test_acceptance_is_learned_for_each_length_of_match_and_forgotten():
    acceptance = Acceptance()
    first = acceptance.chance(1), acceptance.chance(20)
    assert first[0] < first[1]
    for _ in range(10):
        acceptance.note(1, 7, 0)
        acceptance.note(20, 7, 7)
    assert acceptance.chance(1) < first[0] / 3
    assert acceptance.chance(20) > first[1]
    low = acceptance.chance(1)
    for _ in range(300):
        acceptance.pass_time()
    assert acceptance.chance(1) > 2 * low


def test_drafts_of_a_model_are_learned_apart():
    acceptance = Acceptance()
    assert acceptance.chance(BY_MODEL) == pytest.approx(0.6)
    for _ in range(10):
        acceptance.note(BY_MODEL, 7, 7)
        acceptance.note(1, 7, 0)
    assert acceptance.chance(BY_MODEL) > 0.9
    assert acceptance.chance(20) == Acceptance().chance(20)


def test_drafts_that_cost_more_than_the_curve_says_are_made_less_often():
    speculation = Speculation(StepCurve(((1, 1.0), (8, 3.0))), CertainDrafter())
    before = choose_alone(speculation)
    for _ in range(50):
        speculation.estimate.note(1, 0, 1.0)
        speculation.estimate.note(1, 7, 20.0)
    assert before > choose_alone(speculation) == 0
    for _ in range(500):
        speculation.estimate.note(1, 0, 1.0)
    assert choose_alone(speculation) == before


def test_an_estimate_learns_what_a_step_takes_beside_its_tokens_and_what_drafts_cost():
    estimate = StepEstimate(StepCurve(((1, 1.0), (9, 9.0))))
    assert estimate.seconds(2, 3) == 5.0
    for _ in range(200):
        estimate.note(2, 0, 2.5)
        estimate.note(2, 3, 2.5 + 3 * 1.4)
    assert estimate.seconds(2) == pytest.approx(2.5, rel=0.05)
    assert estimate.seconds(2, 3) == pytest.approx(2.5 + 3 * 1.4, rel=0.05)


def test_a_pause_before_a_step_is_learned_and_forgotten():
    estimate = StepEstimate(StepCurve(((1, 1.0), (9, 9.0))))
    for _ in range(50):
        estimate.note_after_pause(2, 3, 5.0 + 0.5)
    assert estimate.pause_s == pytest.approx(0.5, rel=0.05)
    for _ in range(500):
        estimate.note(2, 0, 2.0)
    assert estimate.pause_s < 0.05, "nothing is measured while no drafts are made"


def test_no_step_is_expected_to_take_less_than_by_the_curve():
    """The curve may have been measured on a busy machine, and a large step be much faster now."""
    estimate = StepEstimate(StepCurve(((1, 1.0), (64, 10.0))))
    for _ in range(200):
        estimate.note(64, 0, 2.0)
    assert estimate.seconds(1) == 1.0


def test_an_outlier_and_a_clock_that_stands_still_change_little():
    estimate = StepEstimate(StepCurve(((1, 1.0), (9, 9.0))))
    estimate.note(2, 3, 0.0)
    assert estimate.price == 1.0
    estimate.note(2, 0, 1000.0)
    estimate.note(2, 3, 1000.0)
    assert estimate.seconds(2, 3) < 1.25 * 5.0


def test_a_curve_goes_through_its_points_and_on_behind_them():
    curve = StepCurve(((1, 2.0), (8, 2.0), (16, 4.0)))
    assert [curve.seconds(n) for n in (1, 4, 8, 12, 16, 32)] == [2.0, 2.0, 2.0, 3.0, 4.0, 8.0]


@pytest.mark.parametrize(("num_slabs", "most_tokens"), [(1, 1), (2, 9), (64, 64), (4, 128)])
@pytest.mark.parametrize("lag", [0, 1])
def test_steps_are_measured_on_slabs_of_nobody_and_not_metered(
    tmp_path, num_slabs, most_tokens, lag
):
    runner = FakeRunner(TokenMeter(tmp_path / "meter"), lag)
    runner.slabs = {slab: dict.fromkeys(range(16), (0, None)) for slab in range(num_slabs)}
    ends, run = [], steps_of(runner)

    def run_noting_ends(rows):
        ends.extend(row.end for row in rows)
        return run(rows)

    sizes = DEVICE_SIZES if lag else SIZES
    curve = measure_steps(run_noting_ends, LAYOUT.block_size, num_slabs, most_tokens, 100, sizes)
    assert set(runner.slabs) == set(range(num_slabs))
    assert max(ends) <= 100  # of max_model_len
    assert TokenMeter.read(tmp_path / "meter")[:2] == (0, 0)
    assert len(curve.points) >= 2
    assert all(a <= b for (_, a), (_, b) in zip(curve.points, curve.points[1:], strict=False))


@pytest.mark.parametrize(("host_s", "expected"), [(1e-3, GPU.seconds), (2e-2, lambda _: 2e-2)])
def test_a_devices_step_takes_as_long_as_one_of_many(monkeypatch, host_s, expected):
    """The next step is launched meanwhile, which may take longer than the step."""
    clock = FakeClock(0.0)
    monkeypatch.setattr("time.perf_counter", clock)
    run = steps_of(TimedRunner(None, clock, GPU, host_s))
    curve = measure_steps(run, LAYOUT.block_size, 64, 256, 100, DEVICE_SIZES)
    assert [tokens for tokens, _ in curve.points] == sorted(DEVICE_SIZES)
    for tokens, seconds in curve.points:
        assert seconds == pytest.approx(expected(tokens))


def test_drafts_that_are_rejected_after_a_swap_take_no_place_there():
    """A step behind, a request is preempted while its drafts, in their own block, still run."""
    scheduler = make_scheduler(num_swap_slots=4, drafter=FakeDrafter(share_wrong=1.0))
    scheduler.kv.swap.costs.note_prefill(1, 1.0)
    drafts = [3] * 7
    scheduler.speculation.choose = lambda plan, *_: {r: drafts for r in plan if r.output_token_ids}
    scheduler.add("gw", make_message(prompt_len=14, max_tokens=30))
    first = scheduler.schedule()
    update(scheduler, first, tokens_for(first))
    second = scheduler.schedule()
    assert second.rows[0].num_drafts == 7
    (request,) = scheduler.queues.running
    scheduler.queues.preempt([request])
    assert len(request.swapped) == 2
    update(scheduler, second, tokens_for(second))
    assert len(request.swapped) == LAYOUT.num_blocks(request.num_tokens)
    for batch in iter(scheduler.schedule, None):
        scheduler.check_integrity()
        update(scheduler, batch, tokens_for(batch))
        if not scheduler.has_work:
            return
