"""Bodies on their way in: the rate of a sender, and whose body gives way to whose."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.limits.inflow import GRACE_S, LEAST_BYTES_PER_S, Arrival, Inflow
from tests.server.jumping_loop import run_jumping


class Busy(Exception):
    """The error of an inflow that has no room."""


async def sent(*pieces: tuple[float, int]) -> AsyncIterator[bytes]:
    """Pieces of a body, each as (seconds before it, size in bytes)."""
    for pause_s, size_bytes in pieces:
        await asyncio.sleep(pause_s)
        yield b"x" * size_bytes


def read(*pieces: tuple[float, int]) -> tuple[int, float]:
    """Read a body to its end or until its sender is late: (bytes read, seconds taken)."""

    async def reading(clock: Callable[[], float]) -> tuple[int, float]:
        size_bytes, body = 0, sent(*pieces)
        with Inflow(1, 1, Busy, clock=clock).arrival("a", 1) as arrival:
            try:
                while piece := await arrival.next(body):
                    size_bytes += len(piece)
            except TimeoutError:
                pass
        return size_bytes, clock()

    return run_jumping(reading)


def test_a_sender_that_stalls_is_late_after_the_grace_however_much_it_sent_before() -> None:
    assert read((0, 3), (1000, 3)) == (3, GRACE_S)
    assert read((0, 1 << 24), (1000, 3)) == (1 << 24, GRACE_S)


def test_a_sender_at_the_least_rate_is_never_late_and_a_slower_one_is() -> None:
    kept = [(1.0, LEAST_BYTES_PER_S)] * 60
    assert read(*kept) == (60 * LEAST_BYTES_PER_S, 60.0)
    # Each second takes half a second of the grace.
    slower = [(1.0, LEAST_BYTES_PER_S // 2)] * 60
    assert read(*slower) == (18 * LEAST_BYTES_PER_S // 2, 19.0)


def test_a_small_body_may_take_all_of_the_grace() -> None:
    assert read(*[(1.0, 1)] * 9) == (9, 9.0)


def test_the_readers_own_time_does_not_count() -> None:
    async def reading(clock: Callable[[], float]) -> bytes:
        body = sent((1, 1), (1, 1))
        with Inflow(1, 1, Busy, clock=clock).arrival("a", 1) as arrival:
            await arrival.next(body)
            await asyncio.sleep(10 * GRACE_S)
            return await arrival.next(body)

    assert run_jumping(reading) == b"x"


def test_the_slowest_of_the_largest_tenant_gives_way_and_its_reader_is_told() -> None:
    async def reading(clock: Callable[[], float]) -> list[bool]:
        with ExitStack() as all_of_them:

            def arrive(tenant_id: str) -> Arrival:
                return all_of_them.enter_context(inflow.arrival(tenant_id, 1))

            inflow = Inflow(4, 4, Busy, clock=clock)
            complete, stalled, quick = (arrive("large") for _ in range(3))
            other = arrive("other")
            told = asyncio.create_task(stalled.next(sent((9, 1))))
            await complete.next(sent())
            await quick.next(sent((1, LEAST_BYTES_PER_S)))
            with pytest.raises(Busy):
                arrive("large")
            arrive("new")
            with pytest.raises(Busy):
                await told
            with pytest.raises(Busy):
                stalled.hold(1)
            return [each.has_given_way for each in (complete, stalled, quick, other)]

    assert run_jumping(reading) == [False, True, False, False]


def test_a_body_that_has_come_does_not_give_way() -> None:
    async def reading(clock: Callable[[], float]) -> None:
        inflow = Inflow(2, 2, Busy, clock=clock)
        with inflow.arrival("large", 1) as one, inflow.arrival("large", 1) as two:
            await one.next(sent())
            await two.next(sent())
            with pytest.raises(Busy), inflow.arrival("new", 1):
                pass

    run_jumping(reading)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 5), st.booleans()), max_size=80),
    st.integers(1, 12),
)
def test_a_newcomer_is_refused_only_where_no_tenant_holds_more_than_it_would(
    steps: list[tuple[str, int, bool]], limit: int
) -> None:
    """Steps: (tenant, amount, whether its last body ends instead)."""
    tenant_limit = max(1, limit // 2)
    inflow = Inflow(limit, tenant_limit, Busy, clock=lambda: 0.0)
    opened: list[tuple[Arrival, ExitStack]] = []

    def held() -> Counter[str]:
        return Counter({arrival.tenant_id: 0 for arrival, _ in opened}) + Counter(
            [a.tenant_id for a, _ in opened for _ in range(a.held)]
        )

    for tenant_id, amount, ends in steps:
        before, stack = held(), ExitStack()
        if ends:
            for ended in [pair for pair in opened if pair[0].tenant_id == tenant_id][-1:]:
                ended[1].close()
                opened.remove(ended)
            continue
        wanted = before[tenant_id] + amount
        others = [count for name, count in before.items() if name != tenant_id]
        try:
            opened.append((stack.enter_context(inflow.arrival(tenant_id, amount)), stack))
        except Busy:
            is_full = before.total() + amount > limit
            after = held()
            assert wanted > tenant_limit or (is_full and max(after.values(), default=0) <= wanted)
            assert after[tenant_id] == before[tenant_id]
        else:
            assert wanted <= tenant_limit
            after = held()
            assert after.total() <= limit
            assert after[tenant_id] == wanted
            for name in before.keys() - {tenant_id}:
                # Only a tenant that held more than the newcomer gave something away.
                assert after[name] == before[name] or before[name] > wanted
            assert before.total() + amount <= limit or max(others) > wanted
    for _, stack in opened:
        stack.close()
    with inflow.arrival("last", tenant_limit):
        assert not held()
