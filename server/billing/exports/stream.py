"""An export as a stream: one short read of the ledger a page, nothing held between them."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from server.billing.exports.formats import Encoder
from server.billing.exports.pages import PAGE_SIZE, Page, Range, read_page
from server.billing.receipts.rows import Place
from server.database.database import Database


async def stream(
    database: Database,
    encoder: Encoder,
    within: Range,
    place: Place | None = None,
    *,
    page_size: int = PAGE_SIZE,
) -> AsyncIterator[bytes]:
    """The file in chunks. place: of the last row that the caller has; then no header comes.

    A page is encoded by a thread: 500 receipts take tens of milliseconds, in which the event loop
    has tokens to send.
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
