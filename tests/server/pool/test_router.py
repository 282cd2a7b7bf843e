"""The router's choice of engine, for views of engines made by hand and at random."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from server.pool.router import INDIFFERENCE_S, EngineView, cost_s, route

IDLE = EngineView("a", num_requests=0, seats=8, request_s=2.0)

views = st.builds(
    EngineView,
    name=st.uuids().map(str),
    num_requests=st.integers(0, 40),
    seats=st.integers(1, 16),
    request_s=st.floats(0.01, 30),
    load_s=st.sampled_from((0.0, 0.001, 0.3, 5.0)),
    is_coming=st.booleans(),
    prefill_s=st.floats(0, 3),
)
pools = st.lists(views, min_size=1, max_size=8, unique_by=lambda view: view.name)


def test_a_request_goes_where_its_adapter_is():
    there, elsewhere = replace(IDLE, name="there", num_requests=2), replace(IDLE, load_s=0.3)
    assert route([elsewhere, there], "k") is there


def test_a_crowded_engine_gives_up_its_hot_adapter_to_a_second_one():
    empty = replace(IDLE, name="empty", load_s=0.3)
    choices = [
        route([replace(IDLE, name="home", num_requests=n), empty], "k").name for n in range(24)
    ]
    assert choices[0] == "home"
    assert choices[-1] == "empty"
    assert sorted(choices, reverse=True) == choices, "home stays too crowded"


def test_a_load_under_way_is_joined_and_not_begun_elsewhere():
    coming, other = replace(IDLE, name="coming", load_s=0.3, is_coming=True), IDLE
    assert route([replace(other, load_s=0.3), coming], "k") is coming


def test_a_long_prompt_goes_where_it_is_cached():
    cached, other = replace(IDLE, name="cached", num_requests=3), replace(IDLE, prefill_s=2.0)
    assert route([other, cached], "k") is cached


@given(pools, st.text(), st.randoms())
def test_the_choice_is_as_good_as_any_and_does_not_depend_on_the_order(pool, key, random):
    chosen = route(pool, key)
    assert cost_s(chosen) <= min(map(cost_s, pool)) + INDIFFERENCE_S
    random.shuffle(pool)
    assert route(pool, key) is chosen


@given(views, st.integers(1, 40), st.floats(0.001, 10))
def test_more_requests_a_longer_load_and_a_longer_prompt_make_an_engine_worse(view, more, longer):
    assert cost_s(replace(view, num_requests=view.num_requests + more)) > cost_s(view)
    assert cost_s(replace(view, load_s=view.load_s + longer)) > cost_s(view)
    assert cost_s(replace(view, prefill_s=view.prefill_s + longer)) > cost_s(view)


@given(st.lists(st.text(), min_size=1, max_size=200, unique=True))
def test_cold_adapters_move_only_to_an_engine_that_joins(keys):
    before = [replace(IDLE, name=name, load_s=1.0) for name in "abc"]
    after = [*before, replace(before[0], name="d")]
    for key in keys:
        assert route(after, key).name in (route(before, key).name, "d")


def test_cold_adapters_are_spread_over_idle_engines():
    pool = [replace(IDLE, name=name, load_s=1.0) for name in "abcd"]
    homes = [route(pool, f"adapter {n}").name for n in range(1000)]
    assert all(200 < homes.count(name) < 300 for name in "abcd")
