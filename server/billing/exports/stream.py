"""Streams an export: each page is one short read of the ledger, and none is kept in memory."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from server.billing.exports.formats import Encoder
from server.billing.exports.pages import PAGE_SIZE, Page, Place, Range, read_page
from server.database.database import Database


async def stream(
    database: Database,
    encoder: Encoder,
    within: Range,
    place: Place | None = None,
    *,
    page_size: int = PAGE_SIZE,
) -> AsyncIterator[bytes]:
    """Yield the file in chunks. place: last row that the caller has, if any; then no header comes.

    Pages are encoded in a thread: 500 receipts take tens of milliseconds, and meanwhile the event
    loop has tokens to send.
    """
    if place is None:
        yield encoder.begin()
    next_place: Place | None = place or Place()
    while next_place is not None:
        page: Page = await database.read(
            partial(read_page, within=within, place=next_place, size=page_size)
        )
        if page.receipts and (chunk := await asyncio.to_thread(encoder.add, page.receipts)):
            yield chunk
        next_place = page.next
    yield await asyncio.to_thread(encoder.end)
