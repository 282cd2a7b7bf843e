"""A viewer of the console who keeps cookies as a browser does, without a browser."""

import asyncio
import itertools
import re
from collections.abc import Callable
from html import unescape
from typing import Any
from urllib.parse import urlsplit

import httpx

from server.billing import ledger
from server.database.clock import now_ms
from tests.server.factories import SIGNER, insert_holds, make_end, make_hold, make_price
from tests.server.in_process import InProcess, User

ORIGIN = "http://gateway"
_seqs = itertools.count(1000)


class Visitor:
    """Visits pages of an in-process gateway. Redirects are not followed."""

    def __init__(self, product: InProcess) -> None:
        self._product = product
        self.cookies = httpx.Cookies()

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._send("GET", path, headers=headers)

    def post(self, path: str, form: dict[str, str], origin: str = ORIGIN) -> httpx.Response:
        return self._send("POST", path, data=form, headers={"origin": origin})

    def sign_in(self, key: str, next: str = "") -> httpx.Response:
        return self.post(f"/console/sign-in{f'?next={next}' if next else ''}", {"key": key})

    def call(
        self, method: str, path: str, csrf: str | bytes | None, body: object = None, **headers: Any
    ) -> httpx.Response:
        """Call the API in the session, as a page does.   csrf: None sends no such header."""
        headers |= {} if csrf is None else {"x-chorale-csrf": csrf}
        return self._send(method, path, headers=headers, json=body)

    @property
    def token(self) -> str | None:
        return self.cookies.get("chorale_session")

    def _send(self, method: str, path: str, **options: object) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._product.app)
            async with httpx.AsyncClient(
                transport=transport, base_url=ORIGIN, cookies=self.cookies
            ) as client:
                answer = await client.request(method, path, **options)
                self.cookies = client.cookies
                return answer

        return asyncio.run(send())


SignIn = Callable[[User], Visitor]
"""A function that gives a visitor who has signed in with a user's key."""


def path_of(url: str) -> str:
    """The path and the query of a URL."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def shown(visitor: Visitor, path: str) -> str:
    """The text of a page, without its markup."""
    answer = visitor.get(path)
    assert answer.status_code == 200, answer.text
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.text)).split())


def serve(product: InProcess, owner: User, request_id: str, **fields: Any) -> None:
    """Have the ledger get a request of the tenant.   fields: of its end."""
    database = product.gateway.database
    price = make_price(database)
    hold = {"tenant_id": owner.tenant_id, "engine_id": "engine-7", "key_id": "key"}
    insert_holds(database, make_hold(price, request_id, **hold))
    end = make_end(next(_seqs), request_id, tenant_id=owner.tenant_id, **fields)
    database.write_sync(lambda c: ledger.post(c, SIGNER, "engine-7", [end], now_ms()))
