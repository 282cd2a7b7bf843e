"""A client of Chorale's HTTP API: requests, pages, streams. Uploads are built on it.

ClientError
├── ServerUnreachable    the server does not answer, or its answer broke off
├── ApiRefused           the server answered with an error
├── NotAnAdapter         a folder lacks a file of an adapter           server.client.files
├── Unreadable           a file of an adapter cannot be read
├── NotSendable          a folder has no weights that can be sent      server.cli.adapter_folder
├── StoreUnreachable     the object store does not answer              server.client.direct
├── StoreRefused         the object store refused a part
├── UploadFailed         the files are no adapter that can be served   server.client.uploads
├── NotProvedYet         no engine has proved the adapter in time
└── DirectNotSupported   the server's object store takes no parts by URL
"""

import ipaddress
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from server.text.json_object import JsonObject

_PAGE_SIZE = 1000
_READ_TIMEOUT_S = 600.0
"""Longest silence within an answer: completing an upload reads and checks all of it."""


class ClientError(Exception):
    """Base of the errors that a client raises.

    is_passing: whether the same request may succeed later.   is_common: whether other requests
    would fail as well.
    """

    is_passing = False
    is_common = False
    retry_after_s: float | None = None


class ServerUnreachable(ClientError):
    is_passing = True
    is_common = True

    def __init__(self, base_url: str, reason: str) -> None:
        super().__init__(f"{base_url} does not answer ({reason}). Is `chorale serve` running?")


class ApiRefused(ClientError):
    """An error of the server: the fields of OpenAI's error object, and the HTTP status."""

    def __init__(self, answer: httpx.Response) -> None:
        error = _error_object(answer)
        self.status = answer.status_code
        self.code = error.get("code")
        self.param = error.get("param")
        self.is_passing = _may_pass(answer)
        self.is_common = self.status in (401, 403)
        self.retry_after_s = _retry_after_s(answer)
        super().__init__(str(error.get("message") or f"The server answered {self.status}."))


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer.   retry_after_s: seconds after which to ask again; None if final."""

    body: JsonObject
    retry_after_s: float | None


class Client:
    """A client of one server with one key, used as a context manager.

    read_timeout_s: longest silence within an answer.   transport: for tests.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        read_timeout_s: float = _READ_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(30.0, connect=5.0, read=read_timeout_s),
            transport=transport,
            # The proxy that the environment names must not be asked for this machine's own address.
            trust_env=not is_loopback(self.base_url),
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def request(
        self, method: str, path: str, *, body: Any = None, params: JsonObject | None = None
    ) -> JsonObject:
        """The JSON answer. Raises ServerUnreachable, ApiRefused."""
        return self.ask(method, path, body=body, params=params).body

    def ask(
        self, method: str, path: str, *, body: Any = None, params: JsonObject | None = None
    ) -> Answer:
        """Does `request`. Returns the Retry-After as well."""
        with self._answers():
            return _checked(self._http.request(method, path, json=body, params=_given(params)))

    def post_once(self, path: str, body: JsonObject, key: str) -> JsonObject:
        """Do a POST that has its effect once, however often it is sent under the same key."""
        with self._answers():
            return _checked(self._http.post(path, json=body, headers={"Idempotency-Key": key})).body

    def put(self, path: str, content: Iterator[bytes], headers: dict[str, str]) -> JsonObject:
        """Send bytes as they are read. Returns the JSON answer.

        Raises ServerUnreachable, ApiRefused.
        """
        with self._answers():
            return _checked(self._http.put(path, content=content, headers=headers)).body

    def list_all(
        self, path: str, cursor: str, key: str, params: JsonObject | None = None
    ) -> list[JsonObject]:
        """The items of all pages of a list.   cursor: the parameter for the last item's `key`."""
        items: list[JsonObject] = []
        after = None
        while True:
            page_of = {**(params or {}), cursor: after, "limit": _PAGE_SIZE}
            page = self.request("GET", path, params=page_of)
            items += page["data"]
            if not page["has_more"]:
                return items
            after = items[-1][key]

    def download(
        self,
        path: str,
        params: JsonObject,
        on_headers: Callable[[Mapping[str, str]], None] = lambda _: None,
    ) -> Iterator[bytes]:
        """Yields the answer's bytes as they come.   on_headers: called with the headers before."""
        with self._answers(), self._http.stream("GET", path, params=_given(params)) as answer:
            _check(answer)
            on_headers(answer.headers)
            yield from answer.iter_bytes()

    def stream(self, path: str, body: JsonObject) -> Generator[JsonObject, None, None]:
        """Yields the chunks of a streamed completion.

        Raises ServerUnreachable, and ApiRefused, also for an error in the stream.
        """
        with self._answers(), self._http.stream("POST", path, json=body) as answer:
            _check(answer)
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    chunk: JsonObject = json.loads(data)
                    if "error" in chunk:
                        raise ApiRefused(httpx.Response(answer.status_code, json=chunk))
                    yield chunk

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(self.base_url, reason) from error


def _given(params: JsonObject | None) -> JsonObject:
    return {name: value for name, value in (params or {}).items() if value is not None}


def _checked(answer: httpx.Response) -> Answer:
    _check(answer)
    try:
        content: JsonObject = answer.json()
    except ValueError:
        raise ServerUnreachable(str(answer.url), "its answer is not JSON") from None
    return Answer(content, _retry_after_s(answer))


def _check(answer: httpx.Response) -> None:
    if not answer.is_success:
        answer.read()
        raise ApiRefused(answer)


def _error_object(answer: httpx.Response) -> JsonObject:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _may_pass(answer: httpx.Response) -> bool:
    """Whether the same request may succeed later; the answer to a spent quota says it will not."""
    if answer.headers.get("x-should-retry") == "false":
        return False
    return answer.status_code >= 500 or answer.status_code in (408, 429)


def _retry_after_s(answer: httpx.Response) -> float | None:
    text = answer.headers.get("retry-after")
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:  # a date, which a Chorale server never sends
        return None


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this machine."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
