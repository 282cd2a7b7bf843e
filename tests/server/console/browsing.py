"""A viewer of the console who keeps cookies as a browser does, without a browser."""

import asyncio
from urllib.parse import urlsplit

import httpx

from tests.server.in_process import InProcess

ORIGIN = "http://gateway"


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
        self, method: str, path: str, csrf: str | bytes | None, body: object = None
    ) -> httpx.Response:
        """Call the API in the session, as a page does.   csrf: None sends no such header."""
        headers = {} if csrf is None else {"x-chorale-csrf": csrf}
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


def path_of(url: str) -> str:
    """The path and the query of a URL."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path
