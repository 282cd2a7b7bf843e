"""The modelled pool on cases that can be computed by hand, and the claim at a small size."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.experiment import replace_rows
from bench.pool.__main__ import row
from bench.pool.clock import Clock
from bench.pool.engine import Engine, Job
from bench.pool.gateway import Gateway, Heard, figures_of, marks_of
from bench.pool.machine import Machine, MachineSpec
from bench.pool.modelled import Modelled, figures, ratios
from bench.pool.policies import POLICIES, ConsistentHash, LeastLoaded, RoundRobin
from bench.pool.pool import Outcome, Pool, PoolSpec
from bench.pool.real import Real
from bench.pool.steps import EngineSpec
from bench.pool.traffic import Arrival, Traffic, make_adapters
from server.pool.prefix_table import CHUNK_TOKENS
from server.pool.router import EngineView

ROOMY = 1 << 50
SMALL = Modelled(
    sizes=((6, 400),), machine=MachineSpec(engines=2, disk_bytes=12 << 30), warm_up_s=20.0,
    measured_s=20.0, seeds=(0,),
)  # fmt: skip
BYTES_PER_S = 1e9


class OneEngine:
    """An engine on a machine of its own. moves, fetched, copied: events in the order they came."""

    def __init__(self, *, adapters=4, disk_bytes=ROOMY, store_bytes_per_s=BYTES_PER_S, **spec):
        self.clock = Clock()
        self.adapters = make_adapters(adapters, seed=0)
        self.machine_spec = MachineSpec(
            disk_bytes=disk_bytes, store_delay_s=0.5, store_bytes_per_s=store_bytes_per_s
        )
        self.fetched, self.copied, self.moves = [], [], []
        machine = Machine(self.machine_spec, self.clock, self.fetched.append)
        spec = {"arena_bytes": ROOMY, "copy_bytes_per_s": BYTES_PER_S, **spec}
        self.engine = Engine(
            EngineSpec(**spec),
            self.clock,
            machine,
            self.adapters,
            lambda adapter, tier: self.moves.append((adapter, tier)),
            self.copied.append,
        )
        self.first_s, self.end_s = {}, {}

    def send(self, number, adapter=None, *, at_s=0.0, prompt=512, output=1, shared=0):
        def note(times):
            times[number] = self.clock.now_s

        job = Job(
            number, adapter, (adapter, 0), shared, prompt, output,
            on_first=lambda: note(self.first_s), on_end=lambda: note(self.end_s),
        )  # fmt: skip
        self.clock.at(at_s, lambda: self.engine.submit(job))

    def load_s(self, adapter):
        """Seconds to load an adapter from the store into the arena."""
        size_bytes = self.adapters[adapter].ref.size_bytes
        return self.machine_spec.fetch_s(size_bytes) + size_bytes / BYTES_PER_S


def room_for_one():
    """Return the bytes of an arena that has room for either of two adapters, but not for both."""
    return max(a.ref.size_bytes for a in make_adapters(2, seed=0)) + (4 << 20)


def run(policy="product", *, load=0.8, seconds=20.0, seed=0, traffic=None, **spec):
    traffic = traffic or Traffic(adapters=50)
    spec = PoolSpec(**{"engines": 3, "gateways": 2, "lag_s": 0.25, **spec})
    rate = load * spec.engines * spec.engine.requests_per_s(traffic)
    arrivals = traffic.arrivals(rate, seconds, seed)
    return Pool(spec, make_adapters(traffic.adapters, seed), POLICIES[policy], 0.0).run(arrivals)


def loads(outcome):
    return len(outcome.fetched), len(outcome.copied)


# ---- one engine ----


def test_a_request_alone_takes_its_load_its_prompt_and_its_steps():
    one = OneEngine(step_s=0.01, row_s=0.001, prompt_token_s=1e-4, chunk_tokens=512)
    one.send(0, adapter=2, prompt=768, output=5)
    one.clock.run()
    prompt_s = 768 / 512 * (0.01 + 512 * 1e-4)
    assert one.first_s[0] == pytest.approx(one.load_s(2) + prompt_s)
    assert one.end_s[0] - one.first_s[0] == pytest.approx(4 * 0.011)
    tiers = ["fetching", "disk", "loading", "device"]
    assert one.moves == [(2, tier) for tier in tiers]


def test_a_prompt_slows_down_who_decodes_and_the_other_way_round():
    one = OneEngine(step_s=0.01, row_s=0.001, prompt_token_s=1e-4, chunk_tokens=512)
    one.send(0, prompt=512, output=100)
    one.clock.run()
    alone_s = one.end_s[0]
    one.send(1, at_s=2.0, prompt=512, output=100)
    one.send(2, at_s=2.5, prompt=512, output=1)
    one.clock.run()
    assert one.end_s[1] - 2.0 == pytest.approx(alone_s + 512 * 1e-4)
    assert one.first_s[2] - 2.5 == pytest.approx(0.011 + 512 * 1e-4)


def test_who_finds_no_seat_waits_for_one():
    one = OneEngine(seats=1, row_s=0.0, prompt_token_s=0.0, step_s=0.01, chunk_tokens=512)
    one.send(0, output=11)
    one.send(1, output=11)
    one.clock.run()
    assert one.end_s[0] == pytest.approx(0.11)
    assert one.first_s[1] == pytest.approx(0.12)
    assert one.engine.output_tokens == 22


def test_who_came_first_gets_the_next_seat_once_its_adapter_is_there():
    one = OneEngine(seats=1)
    one.send(0, output=1000)
    one.send(1, adapter=0, at_s=0.1)
    for number in (2, 3):
        one.send(number, at_s=0.2)
    one.clock.run()
    assert sorted(one.first_s, key=one.first_s.__getitem__) == [0, 1, 2, 3]


def test_requests_that_wait_for_one_adapter_load_it_once():
    one = OneEngine()
    for number in range(5):
        one.send(number, adapter=1, at_s=0.01 * number)
    one.clock.run()
    assert len(one.fetched) == len(one.copied) == 1


def test_an_adapter_that_was_evicted_comes_from_disk():
    one = OneEngine(adapters=2, arena_bytes=room_for_one())
    for number, adapter in enumerate([0, 1, 0]):
        one.send(number, adapter, at_s=10.0 * number)
    one.clock.run()
    sizes = [adapter.ref.size_bytes for adapter in one.adapters]
    assert one.fetched == sizes
    assert one.copied == [sizes[0], sizes[1], sizes[0]]
    copy_s = sizes[0] / BYTES_PER_S
    assert one.first_s[2] - 20.0 == pytest.approx(copy_s + 0.008 + 512 * 5e-5)


def test_an_adapter_waits_for_room_while_all_that_is_there_is_in_use():
    one = OneEngine(adapters=2, arena_bytes=room_for_one())
    one.send(0, 0, output=1000)
    one.send(1, 1, at_s=5.0)
    one.clock.run()
    copy_s = one.adapters[1].ref.size_bytes / BYTES_PER_S
    assert one.end_s[0] > 6.0
    assert one.first_s[1] - one.end_s[0] == pytest.approx(copy_s + 0.008 + 512 * 5e-5)


def test_who_was_found_more_often_stays_longer():
    sizes = Counter(adapter.ref.size_bytes for adapter in make_adapters(6, seed=0))
    (size_bytes, _), *_ = sizes.most_common(1)
    same = [n for n, a in enumerate(make_adapters(6, 0)) if a.ref.size_bytes == size_bytes]
    often, once, late = same[:3]
    one = OneEngine(adapters=6, arena_bytes=2 * size_bytes + (6 << 20))
    for number, adapter in enumerate([often, often, once, late]):
        one.send(number, adapter, at_s=10.0 * number)
    one.clock.run()
    assert one.engine.resident == {often, late}


def test_copies_into_one_arena_take_turns():
    one = OneEngine(adapters=2, store_bytes_per_s=ROOMY)
    sizes = [adapter.ref.size_bytes for adapter in one.adapters]
    one.send(0, 0)
    one.send(1, 1)
    one.clock.run()
    assert one.engine.copied_s == pytest.approx((2 * sizes[0] + sizes[1]) / BYTES_PER_S)


def test_downloads_beyond_the_limit_wait_for_their_turn():
    clock, sizes, there = Clock(), [], {}
    spec = MachineSpec(max_fetches=2, store_delay_s=1.0, store_bytes_per_s=ROOMY)
    machine = Machine(spec, clock, sizes.append)
    for number, adapter in enumerate(make_adapters(5, seed=0)):
        machine.fetch(adapter.ref, lambda number=number: there.setdefault(number, clock.now_s))
    clock.run()
    assert [there[n] for n in range(5)] == pytest.approx([1.0, 1.0, 2.0, 2.0, 3.0], abs=1e-3)


def test_the_disk_drops_who_was_not_asked_for_for_longest():
    clock, sizes = Clock(), []
    adapters = make_adapters(3, seed=0)
    room = sum(a.ref.size_bytes for a in adapters) - 1
    machine = Machine(MachineSpec(disk_bytes=room), clock, sizes.append)
    for number in (0, 1, 0, 2, 0):
        machine.fetch(adapters[number].ref, lambda: None)
        clock.run()
    assert sizes == [a.ref.size_bytes for a in adapters]


def test_what_a_full_disk_dropped_comes_from_the_store_again():
    one = OneEngine(adapters=2, arena_bytes=room_for_one(), disk_bytes=1)
    for number, adapter in enumerate([0, 1, 0]):
        one.send(number, adapter, at_s=10.0 * number)
    one.clock.run()
    assert one.fetched == one.copied
    assert len(one.fetched) == 3


def test_a_beginning_that_was_computed_is_not_computed_again():
    one = OneEngine(prefix_tokens=400)
    for number in range(3):
        one.send(number, at_s=float(number), prompt=512, shared=256)
    one.send(3, at_s=3.0, prompt=512, shared=401)
    one.clock.run()
    whole_s, rest_s = one.first_s[0], one.first_s[1] - 1.0
    assert rest_s == pytest.approx(whole_s / 2)
    assert one.engine.cached_tokens == 512


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 7), st.integers(1, 2000), st.integers(1, 50)),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 4),
    st.integers(340, 1000),
)
def test_everybody_ends_and_the_arena_is_never_overfull(requests, seats, arena_mb):
    one = OneEngine(adapters=8, seats=seats, arena_bytes=arena_mb << 20)
    used = []

    def look(adapter, tier):
        resident = one.engine.resident
        used.append(sum(one.adapters[n].ref.size_bytes for n in resident))

    one.engine._on_move = look
    for number, (at_s, adapter, prompt, output) in enumerate(requests):
        one.send(number, adapter, at_s=at_s, prompt=prompt, output=output)
    one.clock.run()
    assert one.first_s.keys() == one.end_s.keys() == set(range(len(requests)))
    assert all(one.first_s[n] <= one.end_s[n] for n in one.first_s)
    assert one.engine.output_tokens == sum(output for *_, output in requests)
    assert one.engine.running == one.engine.waiting == 0
    assert max(used) <= arena_mb << 20
    assert len(one.copied) >= len({adapter for _, adapter, *_ in requests})


# ---- pools ----


def test_with_one_engine_every_policy_is_the_same():
    outcomes = [run(policy, engines=1, seconds=10.0) for policy in POLICIES]
    assert len({(loads(o), tuple(o.ttft_s), tuple(o.requests)) for o in outcomes}) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_without_adapters_nothing_is_loaded(policy):
    outcome = run(policy, traffic=Traffic(adapters=0), seconds=5.0)
    assert loads(outcome) == (0, 0)
    assert len(outcome.ttft_s) == sum(outcome.requests) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_with_room_for_all_each_adapter_is_loaded_once_where_it_is_asked_for(policy):
    roomy = EngineSpec(arena_bytes=ROOMY)
    machine = MachineSpec(engines=2, disk_bytes=ROOMY)
    outcome = run(policy, engine=roomy, machine=machine)
    served = Counter(outcome.replicas)
    assert len(outcome.copied) >= sum(served.values())
    # Adapters that were being loaded at the last arrival are no replicas yet.
    assert len(outcome.copied) - sum(served.values()) < 20
    assert len(outcome.fetched) <= 2 * len(served) + 20


def test_the_same_seed_gives_the_same_run_and_another_one_does_not():
    one, same, other = run(seconds=5.0), run(seconds=5.0), run(seconds=5.0, seed=1)
    assert (loads(one), one.ttft_s, one.requests) == (loads(same), same.ttft_s, same.requests)
    assert one.ttft_s != other.ttft_s


def test_a_home_for_every_adapter_is_the_fewest_loads_and_one_replica():
    home, chance = run("consistent_hash"), run("random")
    assert set(home.replicas.values()) == {1}
    assert len(home.copied) < len(run("product").copied) < len(chance.copied)


def test_what_engines_tell_arrives_after_the_lag():
    spec = PoolSpec(engines=1, lag_s=1.0, machine=MachineSpec(store_delay_s=0.0))
    pool = Pool(spec, make_adapters(1, 0), POLICIES["product"], 0.0)
    (heard,) = pool._heard
    seen = []
    for at_s in (0.9, 1.05, 9.0):
        pool._clock.at(at_s, lambda: seen.append([r.tier for r in heard.residency.values()]))
    pool.run([Arrival(n, 10.0 * n, 0, 0, 1, 1) for n in range(2)])
    assert seen == [[], ["fetching"], ["device"]]


def test_figures_are_what_the_engine_has_and_did():
    one = OneEngine(adapters=1, seats=1)
    one.send(0, adapter=0)
    one.send(1, at_s=0.1)
    one.send(2, at_s=0.1, output=5)
    one.clock.at(0.11, lambda: seen.append(figures_of(one.engine)))
    seen = []
    one.clock.run()
    assert (seen[0].running, seen[0].waiting) == (1, 2)
    device, _, disk = figures_of(one.engine).tiers
    size_bytes = one.adapters[0].ref.size_bytes
    assert (device.load_bytes, disk.load_bytes) == (size_bytes, size_bytes)
    assert device.load_seconds == pytest.approx(size_bytes / BYTES_PER_S)
    assert disk.load_seconds == pytest.approx(one.machine_spec.fetch_s(size_bytes))
    assert Heard(one.engine, "engine-1").welcome.max_num_seqs == 1


class FirstEngine:
    """A policy that chooses the first engine and keeps the views."""

    def choose(self, key, views):
        self.views = views
        return views[0]


def test_a_gateway_counts_its_requests_until_they_end_and_knows_beginnings():
    policy = FirstEngine()
    heard = [Heard(OneEngine().engine, f"engine-{n}") for n in (1, 2)]
    gateway = Gateway(heard, Clock(), policy)
    marks = marks_of((None, 0), 2 * CHUNK_TOKENS)
    for count in range(2):
        assert gateway.choose("key", None, 512, marks) == 0
        assert [view.num_requests for view in policy.views] == [count, 0]
    here, there = policy.views
    assert here.prefill_s == pytest.approx(there.prefill_s * (512 - 2 * CHUNK_TOKENS) / 512)
    gateway.note_end(0, 1.0)
    gateway.choose("key", None, 512, [])
    assert [view.num_requests for view in policy.views] == [1, 0]


def test_only_what_comes_after_the_warm_up_counts():
    traffic = Traffic(adapters=20)
    arrivals = traffic.arrivals(20.0, 10.0, 0)
    whole, half = (
        Pool(PoolSpec(engines=2), make_adapters(20, 0), POLICIES["random"], from_s).run(arrivals)
        for from_s in (0.0, 5.0)
    )
    late = [arrival for arrival in arrivals if arrival.at_s >= 5.0]
    assert sum(half.requests) == len(half.ttft_s) == len(late)
    assert half.prompt_tokens == sum(arrival.prompt_tokens for arrival in late)
    assert 0 < len(half.copied) < len(whole.copied)
    assert sum(half.output_tokens) < sum(whole.output_tokens)


def test_figures_and_ratios_are_of_what_was_counted():
    ours = Outcome(0.0, ttft_s=[1.0], fetched=[10], copied=[10, 20], requests=[3, 1])
    theirs = Outcome(0.0, ttft_s=[2.0], fetched=[10] * 4, copied=[10] * 8, requests=[2, 2])
    for outcome in (ours, theirs):
        outcome.output_tokens, outcome.prompt_tokens, outcome.choose_s = [1, 1], 8, [1e-6]
    ours.replicas = Counter({0: 5, 19: 2})
    compared = ratios({"product": ours, "random": theirs, "least_loaded": theirs})
    assert compared == {
        "random_fetched": 0.25, "random_copied": 0.25, "random_copied_bytes": 0.375,
        "least_loaded_ttft_p99": 0.5, "random_ttft_p99": 0.5,
    }  # fmt: skip
    found = figures(ours, num_adapters=20)
    assert found["copied_per_request"] == 0.5
    assert found["max_to_mean_requests"] == 1.5
    assert (found["replicas_hottest"], found["replicas_cold"]) == (0.5, 2)


# ---- traffic ----


def test_another_rate_asks_for_the_same_adapters():
    slow, fast = (Traffic(adapters=9).arrivals(rate, 20.0, 0) for rate in (5.0, 50.0))
    assert [a.adapter for a in slow] == [a.adapter for a in fast][: len(slow)]
    assert len(fast) == pytest.approx(1000, rel=0.1)


def test_popularity_falls_with_the_number_and_bursts_are_of_one_adapter():
    asked = Counter(a.adapter for a in Traffic(adapters=100).arrivals(1000.0, 50.0, 0))
    assert asked[0] / asked[9] == pytest.approx(10, rel=0.15)
    burst = Traffic(adapters=100, exponent=0.0, burst_share=0.5, burst_s=10.0)
    slots = [Counter(), Counter()]
    for arrival in burst.arrivals(500.0, 20.0, 0):
        slots[int(arrival.at_s / 10)][arrival.adapter] += 1
    tops = [slot.most_common(1)[0] for slot in slots]
    assert all(count / slot.total() > 0.45 for (_, count), slot in zip(tops, slots, strict=True))
    assert tops[0][0] != tops[1][0]


def test_marks_are_one_for_each_chunk_and_differ_between_beginnings():
    marks = marks_of((1, 0), 3 * CHUNK_TOKENS + 1)
    assert len(set(marks)) == 3
    assert not set(marks) & set(marks_of((1, 1), 3 * CHUNK_TOKENS))
    assert marks_of((1, 0), CHUNK_TOKENS - 1) == []


# ---- policies ----


def make_views(*requests):
    return [EngineView(f"engine-{n}", r, 8, 1.0) for n, r in enumerate(requests)]


def test_the_least_loaded_is_one_of_the_emptiest():
    policy = LeastLoaded(0)
    chosen = {policy.choose("key", make_views(3, 1, 1, 2)).name for _ in range(50)}
    assert chosen == {"engine-1", "engine-2"}


def test_round_robin_passes_everybody_and_gateways_begin_elsewhere():
    one, other = RoundRobin(0), RoundRobin(1)
    views = make_views(9, 0, 0)
    assert [one.choose("key", views).name[-1] for _ in range(4)] == ["1", "2", "0", "1"]
    assert other.choose("key", views).name[-1] == "2"


def test_a_hash_sends_an_adapter_home_however_crowded_it_is():
    policy = ConsistentHash()
    homes = {policy.choose("key", make_views(*loads)).name for loads in [(0, 9), (9, 0)]}
    assert len(homes) == 1
    assert len({policy.choose(str(n), make_views(0, 0)).name for n in range(20)}) == 2


# ---- rows ----


def test_the_product_loads_a_third_of_what_chance_loads_and_nobody_waits_longer_for_it():
    (case,) = SMALL.cases()
    outcomes = SMALL.outcomes(case, seed=0)
    compared = ratios(outcomes)
    assert compared["random_copied"] <= 1 / 3
    assert compared["random_fetched"] <= 1 / 3
    assert compared["least_loaded_ttft_p99"] <= 1
    ours = figures(outcomes["product"], case.adapters)
    assert ours["replicas_hottest"] > 1.2
    assert ours["replicas_cold"] < 1.2


def test_a_row_has_a_case_for_every_combination():
    modelled = Modelled(
        sizes=((2, 5), (3, 5)), loads=(0.5,), gateways=(1, 2), lags_s=(0.0, 1.0),
        shared_tokens=(0,), warm_up_s=1.0, measured_s=2.0, seeds=(0, 1),
    )  # fmt: skip
    result = json.loads(row("test", modelled))["result"]
    assert len(result["cases"]) == 8
    assert all(set(case["policies"]) == set(POLICIES) for case in result["cases"])
    assert {(c["engines"], c["gateways"], c["lag_s"]) for c in result["cases"]} == {
        (engines, gateways, lag) for engines in (2, 3) for gateways in (1, 2) for lag in (0.0, 1.0)
    }


def test_the_plot_shows_every_policy(tmp_path):
    plots = pytest.importorskip("bench.pool.plots", exc_type=ImportError)
    modelled = Modelled(
        sizes=((2, 5),), loads=(0.5, 0.8), warm_up_s=1.0, measured_s=2.0, seeds=(0,)
    )
    path = tmp_path / "pool.jsonl"
    replace_rows(path, [row("load", modelled)])
    (drawn,) = plots.draw_all(path)
    assert drawn.name == "pool-load.svg"
    assert drawn.read_text().count("<svg") == 1


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_real_engines_are_measured_under_both_ways_of_routing():
    real = Real(
        engines=2, adapters=6, resident=3, rate=3.0, warm_up_s=3.0, measured_s=4.0, rounds=1
    )
    result = json.loads(row("real", real))["result"]
    ours, chance = result["product"][0], result["random"][0]
    assert ours["requests"] == chance["requests"] > 0
    assert ours["ttft_ms"]["p50"] > 0
    assert result["to_random"].keys() == {"fetched", "placed"}
