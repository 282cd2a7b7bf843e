"""Sends an upload's files straight to the object store, each part to a URL that the server gives.

The server asks the store which parts have arrived. A round sends the missing parts; those that it
left out, or whose URLs had expired, are in the next round with fresh URLs.
"""

import re
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import httpx

from server.client.files import SENT_FILES, read_part
from server.client.http import Client, ClientError, is_loopback
from server.client.patience import Patience
from server.client.progress import Watcher
from server.text.json_object import JsonObject

PARTS_AT_ONCE = 4

_TIMEOUT = httpx.Timeout(30.0, connect=5.0, read=120.0)
_ERROR_CODE = re.compile(r"<Code>(\w{1,64})</Code>")


class StoreUnreachable(ClientError):
    is_passing = True

    def __init__(self, host: str, reason: str) -> None:
        # The message must not have the URL, which gives access to the store for an hour.
        super().__init__(f"The object store at {host} does not answer ({reason}).")


class StoreRefused(ClientError):
    """The object store refuses a part. The error may pass, since the next round has new URLs."""

    is_passing = True

    def __init__(self, host: str, filename: str, number: int, reason: str) -> None:
        super().__init__(
            f"The object store at {host} refuses part {number} of {filename}: {reason}."
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a file.   number: counted from 1, as the store does."""

    filename: str
    number: int
    start: int
    size_bytes: int
    url: str

    @property
    def host(self) -> str:
        return httpx.URL(self.url).host


class DirectSender:
    """Sends an upload to the object store.   transport: replaces the store in tests."""

    def __init__(
        self, client: Client, patience: Patience, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._client = client
        self._patience = patience
        self._transport = transport

    def send(self, upload: JsonObject, folder: Path, watcher: Watcher) -> None:
        """Send rounds until no part is missing. Raises ClientError after several useless rounds."""
        path, failures = f"/v1/uploads/{upload['id']}", 0
        while missing := _missing(upload):
            watcher.restart(_received(upload))
            error = self._put_all(missing, folder, watcher)
            upload = self._patience.insist(lambda: self._client.request("GET", path))
            if len(_missing(upload)) < len(missing):
                failures = 0
            else:
                failures += 1
                error = error or _lost(missing[0])
            if error is not None:
                self._patience.pause(error, failures)

    def _put_all(self, parts: list[_Part], folder: Path, watcher: Watcher) -> ClientError | None:
        """Send parts, PARTS_AT_ONCE at a time, until one fails. Returns the failure, if any."""
        # The API key is not sent: a URL needs none, and a store would refuse a request with both.
        with httpx.Client(
            timeout=_TIMEOUT,
            transport=self._transport,
            trust_env=not is_loopback(parts[0].url),
        ) as store:
            is_over = threading.Event()
            pool = ThreadPoolExecutor(PARTS_AT_ONCE)
            try:
                running = [
                    pool.submit(_put, store, part, folder, watcher, is_over) for part in parts
                ]
                wait(running, return_when=FIRST_EXCEPTION)
            except BaseException:
                # After Ctrl-C the parts under way break off.
                is_over.set()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
        failed = (one.exception() for one in running if not one.cancelled())
        error = next((error for error in failed if error is not None), None)
        if error is not None and not isinstance(error, ClientError):
            raise error
        return error


def _put(
    store: httpx.Client, part: _Part, folder: Path, watcher: Watcher, is_over: threading.Event
) -> None:
    """Send one part. Raises StoreUnreachable, StoreRefused, Unreadable."""
    piece = f"{part.filename} {part.number}"

    def on_read(sent_bytes: int) -> None:
        if is_over.is_set():
            raise StoreUnreachable(part.host, "interrupted")
        watcher.count(piece, sent_bytes)

    end = part.start + part.size_bytes
    body = read_part(folder / part.filename, part.start, end, on_read)
    try:
        answer = store.put(part.url, content=body, headers={"content-length": str(part.size_bytes)})
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise StoreUnreachable(part.host, str(error) or type(error).__name__) from error
    if not answer.is_success:
        code = _ERROR_CODE.search(answer.text)
        reason = f"{answer.status_code} {code[1]}" if code else str(answer.status_code)
        raise StoreRefused(part.host, part.filename, part.number, reason)


def _lost(part: _Part) -> StoreRefused:
    return StoreRefused(part.host, part.filename, part.number, "it took it, and does not have it")


def _missing(upload: JsonObject) -> list[_Part]:
    """The parts that the server misses; none if the upload takes no more.

    A server names no other files than those that are sent.
    """
    return [
        _Part(filename, part["number"], part["start"], part["size_bytes"], part["url"])
        for filename in SENT_FILES
        for part in upload["files"].get(filename, {}).get("parts", ())
    ]


def _received(upload: JsonObject) -> dict[str, int]:
    return {name: int(file["received_bytes"]) for name, file in upload["files"].items()}
