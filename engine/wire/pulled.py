"""Items that work hands over as they come, for a reader that takes them one after another."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def pulled(
    work: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]],
) -> AsyncGenerator[T, None]:
    """Yield what `work` hands to its argument, in order. Closing the generator cancels the work.

    Items wait for their reader without a limit, so the work has to have one. Raises what the work
    raises, behind its items.
    """
    items: asyncio.Queue[T | None] = asyncio.Queue()
    working = asyncio.create_task(work(items.put_nowait))
    working.add_done_callback(lambda _: items.put_nowait(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
