"""Pools of drafts: a tenant's own answers, within its share, and nobody else's."""

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts.ngrams import NO_DRAFT
from engine.drafts.pools import _BYTES_PER_TOKEN, DraftPools
from engine.drafts.speculation import Speculation
from engine.drafts.text import TextDrafter
from engine.wire.messages import DraftStats, ForgetDrafts
from tests.engine.fakes import (
    FLAT,
    FakeClock,
    expected_tokens,
    make_adapter,
    make_core,
    make_message,
    run_until_idle,
    tokens_of,
)

MOST_BYTES = 16 * 40_000
TENANTS = [f"t{i}" for i in range(20)]
KEYS = st.tuples(st.sampled_from(TENANTS), st.sampled_from([None, "d1", "d2"]))
TEXTS = st.lists(st.integers(0, 5), max_size=90)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS, TEXTS),
        st.tuples(st.just("forget"), KEYS),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 2000.0, 4000.0])),
    ),
    max_size=60,
)


def carry_out(pools, clock, events):
    for kind, *arguments in events:
        if kind == "add":
            pools.add(*arguments)
        elif kind == "forget":
            pools.forget(*arguments[0])
        else:
            clock.now += arguments[0]


def drafts_of(pools, tenant_id):
    tails = [[a, b, c] for a in range(6) for b in range(6) for c in range(6)]
    keys = [(tenant_id, digest) for digest in (None, "d1", "d2")]
    return [pools.find(key, tail, 7) for key in keys for tail in tails]


@given(EVENTS)
def test_pools_stay_within_their_bounds_through_any_sequence(events):
    clock = FakeClock()
    pools = DraftPools(MOST_BYTES, clock)
    for event in events:
        carry_out(pools, clock, [event])
        assert pools.size_bytes <= MOST_BYTES
        for tenant_id in TENANTS:
            own = [pool for key, pool in pools._pools.items() if key[0] == tenant_id]
            assert sum(pool.size_bytes for pool in own) <= MOST_BYTES / 16


@given(EVENTS)
def test_a_tenants_drafts_are_the_same_with_and_without_other_tenants(events):
    """There is room for all, as the last four of the 20 tenants have no pools."""
    clocks = FakeClock(), FakeClock()
    everyone, alone = DraftPools(MOST_BYTES, clocks[0]), DraftPools(MOST_BYTES, clocks[1])
    few = [event for event in events if event[0] == "wait" or event[1][0] in TENANTS[:16]]
    carry_out(everyone, clocks[0], few)
    carry_out(alone, clocks[1], [e for e in few if e[0] == "wait" or e[1][0] == "t3"])
    assert drafts_of(everyone, "t3") == drafts_of(alone, "t3")
    assert [p.size_bytes for k, p in everyone._pools.items() if k[0] == "t3"] == [
        p.size_bytes for p in alone._pools.values()
    ]


def test_the_memory_of_a_pool_is_what_it_counts():
    stream = random.Random(0)
    texts = [[stream.randrange(300, 50_000) for _ in range(500)] for _ in range(40)]
    pools = DraftPools(16 * 64 << 20)
    tracemalloc.start()
    for text in texts:
        pools.add(("t", None), text)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * pools.size_bytes < used <= pools.size_bytes
    assert pools.size_bytes > _BYTES_PER_TOKEN * 20_000


def test_new_answers_take_the_place_of_the_oldest():
    pools = DraftPools(MOST_BYTES)
    for first in range(0, 3000, 10):
        pools.add(("t", None), range(first, first + 10))
    assert pools.find(("t", None), [2990, 2991, 2992], 2).token_ids == (2993, 2994)
    assert pools.find(("t", None), [0, 1, 2], 2) == NO_DRAFT


def test_pools_of_no_bytes_keep_nothing():
    pools = DraftPools(0)
    pools.add(("t", None), [1, 2, 3])
    assert len(pools) == 0


def test_an_answer_is_drafted_from_the_tenants_own_answers_with_the_same_adapter(tmp_path):
    """Only where both requests say so, and until the adapter's answers are forgotten."""
    pools = DraftPools(16 << 20)
    speculation = Speculation(FLAT, TextDrafter(pools), pools)
    core = make_core(tmp_path, speculate=lambda *_: speculation)
    adapter, prompt = make_adapter(), list(range(1, 10))

    def accepted(name, tenant_id="t1", **options):
        options = {"tenant_id": tenant_id, "shares_drafts": True, **options}
        core.handle("gw", message := make_message(name, prompt=prompt, max_tokens=40, **options))
        outputs = run_until_idle(core)[name]
        assert tokens_of(outputs) == expected_tokens(message)
        return outputs[-1].num_accepted_tokens

    few = accepted("first", adapter=adapter)
    assert few < 10
    assert accepted("again", adapter=adapter) > 25
    assert accepted("without", adapter=adapter, shares_drafts=False) == few
    assert accepted("other tenant", "t2", adapter=adapter) == few
    assert accepted("base model") < 10
    speculation.forget_drafts("t1", adapter.digest)
    assert accepted("after", adapter=adapter) == few
    assert core.take_stats().drafts.pools == 3
    speculation.forget_drafts("t1", None)
    assert core.take_stats().drafts.pools == 1


def test_an_answer_under_way_is_not_kept_once_its_adapter_is_forgotten(tmp_path):
    pools = DraftPools(16 << 20)
    speculation = Speculation(FLAT, TextDrafter(pools), pools)
    core, adapter = make_core(tmp_path, speculate=lambda *_: speculation), make_adapter()
    for name, own in (("r1", adapter), ("r2", None)):
        core.handle("gw", make_message(name, max_tokens=9, adapter=own, shares_drafts=True))
    core.step()
    core.handle("gw", ForgetDrafts(tenant_id="t1", adapter_digest=adapter.digest))
    run_until_idle(core)
    assert len(pools) == 1
    core.handle("gw", ForgetDrafts(tenant_id="t1", adapter_digest=None))
    assert len(pools) == 0


def test_an_engine_without_drafts_tells_of_none_and_has_none_to_forget(tmp_path):
    core = make_core(tmp_path)
    assert core.handle("gw", ForgetDrafts(tenant_id="t1")) == []
    core.handle("gw", make_message(max_tokens=9))
    run_until_idle(core)
    assert core.take_stats().drafts == DraftStats()
