"""Pieces of a body reach the client in their order, whether they are written or sent."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from server.api.live_body import LiveBody


class Client:
    """A connection and an ASGI `send` of one client. is_behind: whether it takes nothing now."""

    def __init__(self):
        self.got = b""
        self.has_all = False
        self.is_behind = False
        self._caught_up = asyncio.Event()

    def write_piece(self, piece):
        if not self.is_behind:
            self.got += piece
        return not self.is_behind

    async def send(self, message):
        while self.is_behind:
            await self._caught_up.wait()
        self.got += message["body"]
        self.has_all = not message["more_body"]

    def catch_up(self):
        self.is_behind = False
        self._caught_up.set()
        self._caught_up = asyncio.Event()


@given(st.lists(st.sampled_from(["write", "fall behind", "catch up", "wait"])), st.booleans())
async def test_a_client_gets_every_piece_once_and_in_order(steps, has_connection):
    client, written = Client(), b""
    body = LiveBody({"state": {"connection": client}} if has_connection else {}, client.send)
    for number, step in enumerate(steps):
        if step == "write":
            written += b"%d," % number
            body.write(b"%d," % number)
        elif step == "wait":
            await asyncio.sleep(0)
        elif step == "catch up":
            client.catch_up()
        else:
            client.is_behind = True
    client.catch_up()
    await body.end()
    assert client.got == written
    assert client.has_all


async def test_who_reads_pays_no_switch_of_tasks():
    client = Client()
    body = LiveBody({"state": {"connection": client}}, client.send)
    body.write(b"now")
    assert client.got == b"now"
    body.close()
