"""Sends webhook events by HTTP, signed, to addresses that were checked."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from registry.errors import Invalid
from server.webhooks.events import Event, Webhook, signed_headers
from server.webhooks.urls import UrlRules, check_url, resolve

if TYPE_CHECKING:  # as in server.webhooks.urls
    import httpx

TIMEOUT_S = 5.0
"""Time limit of one try, from the look-up of the host to the end of the answer."""
MAX_ANSWER_BYTES = 1024


class Sender(Protocol):
    """Sends events one try at a time."""

    async def send(
        self, webhook: Webhook, event: Event, at_ms: int
    ) -> tuple[int | None, str | None]:
        """Return (status, error). status is None without an answer, error if it was delivered."""

    async def close(self) -> None:
        """Close connections; a later `send` makes new ones."""


class HttpSender:
    """Sends events over connections that are kept until `close`."""

    def __init__(self, pepper: str, rules: UrlRules, *, timeout_s: float = TIMEOUT_S) -> None:
        self._pepper = pepper
        self._rules = rules
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None

    async def send(
        self, webhook: Webhook, event: Event, at_ms: int
    ) -> tuple[int | None, str | None]:
        import httpx

        if self._client is None:
            # The client is made only when an event is due: reading the certificates takes 40 ms, in
            # which nothing else runs. It uses no proxy and no .netrc, so that it connects to the
            # address that was checked.
            self._client = httpx.AsyncClient(
                trust_env=False, follow_redirects=False, timeout=self._timeout_s
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                url = check_url(webhook.url, self._rules)
                address = await resolve(url, self._rules)
                async with self._client.stream(
                    "POST",
                    url.copy_with(host=address),
                    content=event.body.encode(),
                    headers={
                        "host": url.netloc.decode(),
                        "content-type": "application/json",
                        "accept-encoding": "identity",
                        "user-agent": "chorale-webhook",
                        **signed_headers(self._pepper, webhook.webhook_id, event, at_ms),
                    },
                    # The certificate must be valid for the host name, not for the address.
                    extensions={"sni_hostname": url.host},
                ) as answer:
                    await _read_little(answer)
        except TimeoutError:
            return None, f"no answer within {self._timeout_s:g} s"
        except Invalid as error:
            return None, str(error)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return None, f"cannot be reached ({type(error).__name__})"
        is_taken = 200 <= answer.status_code < 300
        return answer.status_code, None if is_taken else f"answered {answer.status_code}"

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


async def _read_little(answer: "httpx.Response") -> None:
    """Read an answer of up to MAX_ANSWER_BYTES to its end, so that its connection can be reused."""
    received = 0
    async for chunk in answer.aiter_raw():
        received += len(chunk)
        if received > MAX_ANSWER_BYTES:
            return
