"""Items of work are read in order; who stops reading ends the work."""

import asyncio

import pytest

from engine.wire.pulled import pulled


def test_items_come_in_order_and_then_the_error_of_the_work():
    async def work(take):
        for number in range(3):
            take(number)
        raise KeyError("broken")

    async def run():
        reader = pulled(work)
        assert [await anext(reader) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(KeyError):
            await anext(reader)

    asyncio.run(run())


def test_closing_the_reader_cancels_the_work():
    cancelled = []

    async def work(take):
        take(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run():
        reader = pulled(work)
        assert await anext(reader) == 1
        await reader.aclose()

    asyncio.run(run())
    assert cancelled
