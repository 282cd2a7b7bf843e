"""Fairness over all engines: the service totals that they exchange, and the effect on order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, none, one_of, sampled_from, tuples

from engine.scheduling import shared_service
from engine.scheduling.fairness import DECODE_COST, VirtualTokenCounters
from engine.scheduling.shared_service import GivenService, HeardService
from engine.wire.messages import TenantService
from tests.engine.fair_pool import STEP_S, Demand, FairPool, Network
from tests.engine.fakes import (
    FakeClock,
    make_core,
    make_message,
    make_scheduler,
)

EVERYWHERE = (0, 1, 2)
PATIENCE_S = 5.0
networks = one_of(none(), integers(0, 1 << 16)).map(Network)
lengths = tuples(integers(1, 30), integers(1, 20))


def spread_and_three_at_home(weight=1.0, prompt_len=8, max_tokens=6):
    """Demands of a tenant at three engines, and of a tenant at each engine that is only there."""
    shape = {"prompt_len": prompt_len, "max_tokens": max_tokens}
    homes = {f"home{number}": Demand((number,), **shape) for number in EVERYWHERE}
    return {"spread": Demand(EVERYWHERE, weight, **shape)} | homes


def elsewhere(totals, engine_id="eng-far", epoch=1):
    return TenantService(engine_id=engine_id, epoch=epoch, totals=tuple(totals.items()))


# ---- the bound ----


@given(lengths, sampled_from([1.0, 3.0]), integers(1, 20), networks)
@settings(max_examples=12, deadline=None)
def test_who_is_at_all_engines_is_never_ahead_of_who_is_at_one_by_more_than_the_bound(
    shape, weight, every, network
):
    demands = spread_and_three_at_home(weight, *shape)
    pool = FairPool(3, demands, every, network)
    differences = []

    def check():
        given = pool.service.given
        differences.extend(given["spread"] - given[tenant] for tenant in demands)

    pool.run(250, check)
    assert max(differences) - min(differences) <= pool.bound


def test_without_an_exchange_the_same_claim_fails():
    pool = FairPool(3, spread_and_three_at_home(), every=0)
    pool.run(600)
    given = pool.service.given
    assert given["spread"] - given["home0"] > 2 * pool.bound
    assert given["spread"] == pytest.approx(3 * given["home0"], rel=0.05)


@given(
    lists(lengths, min_size=2, max_size=2), sampled_from([1.0, 2.0, 5.0]), integers(2, 3),
    integers(1, 20), networks,
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_backlogged_at_all_engines_they_get_equal_weighted_service_within_the_bound(
    shapes, weight, num_engines, every, network
):
    everywhere = tuple(range(num_engines))
    demands = {
        name: Demand(everywhere, weight, *shape)
        for name, weight, shape in zip(("one", "other"), (1.0, weight), shapes, strict=True)
    }
    pool = FairPool(num_engines, demands, every, network)
    differences = [0.0]
    given = pool.service.given
    pool.run(200, lambda: differences.append(given["one"] - given["other"]))
    assert max(differences) - min(differences) <= pool.bound


@pytest.mark.parametrize(("weight", "seed"), [(1.0, 1), (4.0, None)])
def test_in_the_long_run_weights_hold_over_the_pool(weight, seed):
    pool = FairPool(3, spread_and_three_at_home(weight), network=Network(seed))
    pool.run(800)
    weighted = pool.service.given.values()
    assert max(weighted) == pytest.approx(min(weighted), rel=0.1)


def test_who_is_at_one_engine_gets_that_engine_while_another_has_two_more():
    """Max-min fairness: the tenant gets all of its engine, and the other one still gets more."""
    demands = {"spread": Demand(EVERYWHERE), "home": Demand((0,))}
    pool = FairPool(3, demands)
    pool.run(400)
    given = pool.service.given
    engine = sum(given.values()) / 3
    assert given["home"] == pytest.approx(engine, rel=0.1)
    shared = FairPool(3, demands, every=0)
    shared.run(400)
    assert shared.service.given["home"] < 0.55 * given["home"], "home gets half without an exchange"


# ---- no starvation, no saved-up service ----


def busy_here(tenants=("here", "spread"), num_steps=20):
    """A pool of one engine with one seat, at which these tenants always have requests waiting."""
    demands = {tenant: Demand((0,)) for tenant in tenants}
    pool = FairPool(1, demands, every=0, max_num_seqs=1)
    pool.run(num_steps)
    return pool


def service_of_steps(pool, tenant, num_steps, before_step=lambda step: None):
    """The tenant's service in each of `num_steps` steps."""
    given = []
    for step in range(num_steps):
        before = pool.service.given[tenant]
        before_step(step)
        pool.step()
        given.append(pool.service.given[tenant] - before)
    return given


def longest_pause_s(given):
    """Longest time without service, given the service of each step."""
    longest = pause = 0
    for service in given:
        pause = 0 if service else pause + 1
        longest = max(longest, pause)
    return longest * STEP_S


TURN_S = 8 * STEP_S  # a request of 8 prompt and 6 answer tokens, after another


def test_however_much_it_gets_elsewhere_it_has_a_turn_here_in_time():
    pool = busy_here()
    policy = pool.engines[0].policy
    total = 0.0

    def far_away(step):
        nonlocal total
        total += 1e6
        policy.note_elsewhere(elsewhere({"spread": total}))

    given = service_of_steps(pool, "spread", 2000, far_away)
    assert PATIENCE_S - 1 <= longest_pause_s(given) <= PATIENCE_S + 3 * TURN_S


def waiting_requests(*tenants):
    scheduler = make_scheduler(scheduling_policy="fcfs")
    for tenant in tenants:
        scheduler.add("gw", make_message(tenant, tenant_id=tenant))
    return scheduler.queues.waiting


def test_what_it_got_elsewhere_is_forgiven_once_and_not_again_what_it_got_here():
    clock = FakeClock()
    counters = VirtualTokenCounters(clock)
    here, spread = requests = waiting_requests("here", "spread")
    counters.order(requests)
    for total in (0.0, 100.0):
        counters.note_elsewhere(elsewhere({"spread": total}))
    counters.charge(here, 150.0)
    counters.order(requests)  # "here" has overtaken "spread", so all of the 100 is made up for
    counters.charge(spread, 100.0)
    clock.now += PATIENCE_S
    counters.order(requests)
    assert counters.counters == {"here": 150.0, "spread": 200.0}
    counters.note_elsewhere(elsewhere({"spread": 107.0}))
    assert counters.counters["spread"] == 207.0
    counters.order(requests)
    assert counters.counters["spread"] == 200.0
    counters.charge(spread, 1.0)
    counters.note_elsewhere(elsewhere({"spread": 110.0}))
    counters.order(requests)
    assert counters.counters["spread"] == 204.0, "it was served here a moment ago"


def test_what_it_got_elsewhere_while_it_was_behind_the_others_is_no_lead_to_forgive():
    clock = FakeClock()
    counters = VirtualTokenCounters(clock)
    here, spread = waiting_requests("here", "spread")
    counters.order([here])
    for total in (0.0, 100.0):
        counters.note_elsewhere(elsewhere({"spread": total}))
    counters.charge(here, 150.0)
    counters.order([here])
    counters.note_elsewhere(elsewhere({"spread": 110.0}))
    counters.order([here, spread])
    assert counters.counters == {"here": 150.0, "spread": 160.0}
    counters.charge(spread, 40.0)
    clock.now += PATIENCE_S
    counters.order([here, spread])
    assert counters.counters["spread"] == 190.0


def test_while_nobody_waits_here_nobody_pays_for_elsewhere():
    counters = VirtualTokenCounters(FakeClock())
    counters.order([])
    for total in (0.0, 1e6):
        counters.note_elsewhere(elsewhere({"spread": total}))
    assert counters.counters == {}


# ---- messages ----


@given(lists(integers(1, 100), min_size=1, max_size=12), integers(0, 1 << 30), booleans())
def test_whatever_is_lost_repeated_or_late_the_newest_total_says_it_all(growth, seed, is_lossy):
    chance = random.Random(seed)
    totals = [float(sum(growth[: n + 1])) for n in range(len(growth))]
    first, *later = [elsewhere({"t": total}) for total in totals]
    sent = [m for m in later if not is_lossy or m is later[-1] or chance.random() < 0.5]
    sent += chance.choices(sent, k=5) if sent else []
    chance.shuffle(sent)
    heard = HeardService()
    assert heard.take_in(first) == [], "a first total may be of earlier service"
    news = [service for message in sent for _, service in heard.take_in(message)]
    assert sum(news) == pytest.approx(totals[-1] - totals[0])
    assert all(service > 0 for service in news)


def test_an_engine_that_started_again_counts_from_its_start_and_its_past_no_more():
    heard = HeardService()
    heard.take_in(elsewhere({"t": 100.0}, epoch=1))
    assert heard.take_in(elsewhere({"t": 130.0}, epoch=1)) == [("t", 30.0)]
    assert heard.take_in(elsewhere({"t": 5.0}, epoch=2)) == [("t", 5.0)]
    assert heard.take_in(elsewhere({"t": 200.0}, epoch=1)) == []
    assert heard.take_in(elsewhere({"t": 6.0}, epoch=2)) == [("t", 1.0)]


def test_engines_are_told_apart():
    heard = HeardService()
    for engine_id in ("eng-a", "eng-b"):
        heard.take_in(elsewhere({"t": 10.0}, engine_id))
    assert heard.take_in(elsewhere({"t": 12.0}, "eng-a")) == [("t", 2.0)]
    assert heard.take_in(elsewhere({"t": 11.0}, "eng-b")) == [("t", 1.0)]


def test_of_many_tenants_a_message_tells_some_and_the_next_ones_the_rest():
    given = GivenService()
    for number in range(2500):
        given.add(f"t{number}", 1.0)
    messages = [given.take() for _ in range(4)]
    assert [len(totals) for totals in messages] == [1000, 1000, 500, 0]
    assert {tenant for totals in messages for tenant, _ in totals} == {
        f"t{number}" for number in range(2500)
    }


def test_what_is_remembered_has_a_limit_and_forgetting_charges_nobody(monkeypatch):
    monkeypatch.setattr(shared_service, "_MAX_TOTALS", 10)
    monkeypatch.setattr(shared_service, "_MAX_HEARD", 10)
    given, heard = GivenService(), HeardService()
    for number in range(20):
        given.add(f"t{number}", 100.0)
        heard.take_in(elsewhere({f"t{number}": 100.0}))
    assert [tenant for tenant, _ in given.take()] == [f"t{number}" for number in range(10, 20)]
    assert len(given._totals) == len(heard._totals) == 10
    assert heard.take_in(elsewhere({"t0": 101.0, "t19": 101.0})) == [("t19", 1.0)]
    given.add("t0", 1.0)
    assert given.take() == (("t0", 1.0),)


# ---- the engine ----


def test_cores_tell_what_they_gave_and_charge_what_they_hear(tmp_path):
    cores = {
        name: make_core(tmp_path / name, scheduling_policy="vtc", max_num_seqs=1)
        for name in ("near", "far")
    }
    far = cores["far"]
    far.journal.engine_id = "eng-far"
    for core in cores.values():
        for i in range(4):
            message = make_message(f"r{i}", 9, 5, tenant_id="spread", weight=2.0)
            core.handle("gw", message)
            core.handle("gw", make_message(f"h{i}", 9, 5, tenant_id="here"))
    near_counters = cores["near"].scheduler.policy.counters
    for core in cores.values():
        core.step()
    (first,) = far.take_service(epoch=7)
    assert (first.engine_id, first.epoch) == ("eng-far", 7)
    assert first.totals == (("spread", (9 + DECODE_COST) / 2.0),)
    cores["near"].handle("gw", first)
    far.step()
    (second,) = far.take_service(epoch=7)
    before = near_counters["spread"]
    cores["near"].handle("gw", second)
    assert near_counters["spread"] == before + DECODE_COST / 2.0
    for own in (first, second):
        far.handle("gw", own)
    assert far.scheduler.policy.counters["spread"] == second.totals[0][1], "own totals do not count"
    assert far.take_service(epoch=7) == []


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_where_there_is_no_share_to_keep_nothing_is_told(policy, tmp_path):
    core = make_core(tmp_path, scheduling_policy=policy)
    core.handle("gw", make_message())
    core.step()
    core.handle("gw", elsewhere({"t1": 1e9}))
    assert core.take_service(epoch=1) == []
