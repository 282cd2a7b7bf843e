"""Chorale's HTTP API as a client sees it: requests, pages, streams, and uploads that resume.

ClientError
├── ServerUnreachable    nobody answers there, or the answer broke off
├── ApiRefused           the server answered with an error
└── NotAnAdapter         a folder without the two files of one
"""

import hashlib
import ipaddress
import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PART_BYTES = 16 << 20

_CHUNK_BYTES = 256 << 10
_PAGE_SIZE = 1000
# Completing an upload reads and checks all of it.
_TIMEOUT = httpx.Timeout(30.0, connect=5.0, read=600.0)
_MAX_FAILURES = 5
_MAX_PAUSE_S = 10.0

Progress = Callable[[int, int], None]
"""Called with (sent_bytes, size_bytes) of an adapter as its bytes leave."""


class ClientError(Exception):
    """What kept a command from its answer. is_passing: the same again may succeed."""

    is_passing = False
    retry_after_s: float | None = None


class ServerUnreachable(ClientError):
    is_passing = True

    def __init__(self, base_url: str, reason: str) -> None:
        super().__init__(f"{base_url} does not answer ({reason}). Is `chorale serve` running?")


class ApiRefused(ClientError):
    """The fields of OpenAI's error object, and the status it came with."""

    def __init__(self, answer: httpx.Response) -> None:
        error = _error_object(answer)
        self.status = answer.status_code
        self.code = error.get("code")
        self.param = error.get("param")
        self.is_passing = self.status >= 500 or self.status == 429
        self.retry_after_s = _seconds(answer.headers.get("retry-after"))
        super().__init__(str(error.get("message") or f"The server answered {self.status}."))


class NotAnAdapter(ClientError):
    def __init__(self, folder: Path, filename: str) -> None:
        super().__init__(f"{folder} has no {filename}; an adapter is a folder as PEFT saves it.")


class Client:
    """One server, one key. Used as a context manager.

    part_bytes: of an upload; the server takes no larger ones.   transport, sleep: for tests.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        part_bytes: int = PART_BYTES,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._part_bytes = part_bytes
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={"authorization": f"Bearer {key}"},
            timeout=_TIMEOUT,
            transport=transport,
            # A proxy of the environment is not for this machine's own address.
            trust_env=not _is_loopback(self.base_url),
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def request(
        self, method: str, path: str, *, body: Any = None, params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The JSON answer. Raises ServerUnreachable, ApiRefused."""
        given = {name: value for name, value in (params or {}).items() if value is not None}
        with self._answers():
            return _checked(self._http.request(method, path, json=body, params=given))

    def list_all(self, path: str, cursor: str, key: str) -> list[dict[str, Any]]:
        """Every page of a list. cursor: the parameter that takes the last item's `key`."""
        items: list[dict[str, Any]] = []
        after = None
        while True:
            page = self.request("GET", path, params={cursor: after, "limit": _PAGE_SIZE})
            items += page["data"]
            if not page["has_more"]:
                return items
            after = items[-1][key]

    def download(self, path: str, params: dict[str, Any]) -> Iterator[bytes]:
        """The answer's bytes as they come."""
        given = {name: value for name, value in params.items() if value is not None}
        with self._answers(), self._http.stream("GET", path, params=given) as answer:
            _check_stream(answer)
            yield from answer.iter_bytes()

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed completion. Raises ApiRefused for an error in mid-stream too."""
        with self._answers(), self._http.stream("POST", path, json=body) as answer:
            _check_stream(answer)
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    chunk: dict[str, Any] = json.loads(data)
                    if "error" in chunk:
                        raise ApiRefused(httpx.Response(answer.status_code, json=chunk))
                    yield chunk

    # ---- uploads ----

    def push(
        self,
        name: str,
        folder: Path,
        *,
        alias: str | None = None,
        memory: "UploadMemory | None" = None,
        on_progress: Progress = lambda sent_bytes, size_bytes: None,
    ) -> dict[str, Any]:
        """Upload a folder as the next version of `name`; the answer of its completion.

        What breaks off is taken up again where the server stands, also by a later call that
        remembers the upload. Raises ClientError.
        """
        files = describe(folder)
        upload = self._open_upload(name, files, alias, memory)
        received = {file: int(state["received_bytes"]) for file, state in upload["files"].items()}
        size_bytes = sum(file["size_bytes"] for file in files.values())

        def report(filename: str, received_bytes: int) -> None:
            received[filename] = received_bytes
            on_progress(sum(received.values()), size_bytes)

        for filename in ADAPTER_FILES:
            self._send_file(upload["id"], folder / filename, received[filename], report)
        answer = self.request("POST", f"/v1/uploads/{upload['id']}/complete")
        if memory:
            memory.forget()
        return answer

    def _open_upload(
        self,
        name: str,
        files: dict[str, dict[str, Any]],
        alias: str | None,
        memory: "UploadMemory | None",
    ) -> dict[str, Any]:
        """The upload that an earlier call left, where there is one, or a new one."""
        wanted = {"base_url": self.base_url, "name": name, "alias": alias, "files": files}
        if memory and (upload_id := memory.recall(wanted)):
            try:
                upload = self.request("GET", f"/v1/uploads/{upload_id}")
            except ApiRefused as error:
                if error.status != 404:
                    raise
            else:
                # A complete one is asked again and gives its version again.
                if upload["state"] in ("open", "complete"):
                    return upload
        body = {"files": files, "alias": alias}
        upload = self.request("POST", f"/v1/adapters/{name}/uploads", body=body)
        if memory:
            memory.remember(wanted, upload["id"])
        return upload

    def _send_file(
        self, upload_id: str, path: Path, start: int, report: Callable[[str, int], None]
    ) -> None:
        """Part after part from `start`; after a failure from where the server says it stands."""
        size_bytes, failures = path.stat().st_size, 0
        at: int | None = start
        while at != size_bytes:
            try:
                if at is None:
                    at = self._received_bytes(upload_id, path.name)
                else:
                    at = self._put_part(upload_id, path, at, report)
                    failures = 0
                report(path.name, at)
            except ClientError as error:
                is_misplaced = getattr(error, "code", None) == "upload_offset_mismatch"
                failures += 1
                if failures > _MAX_FAILURES or not (error.is_passing or is_misplaced):
                    raise
                if not is_misplaced:
                    pause_s = error.retry_after_s or 0.5 * 2**failures
                    self._sleep(min(pause_s, _MAX_PAUSE_S))
                at = None

    def _received_bytes(self, upload_id: str, filename: str) -> int:
        upload = self.request("GET", f"/v1/uploads/{upload_id}")
        return int(upload["files"][filename]["received_bytes"])

    def _put_part(
        self, upload_id: str, path: Path, start: int, report: Callable[[str, int], None]
    ) -> int:
        """Send one part; the bytes that the server has then."""
        size_bytes = path.stat().st_size
        end = min(start + self._part_bytes, size_bytes)

        def body() -> Iterator[bytes]:
            with path.open("rb") as file:
                file.seek(start)
                for at in range(start, end, _CHUNK_BYTES):
                    yield file.read(min(_CHUNK_BYTES, end - at))
                    report(path.name, min(at + _CHUNK_BYTES, end))

        headers = {
            "content-range": f"bytes {start}-{end - 1}/{size_bytes}",
            "content-length": str(end - start),
        }
        url = f"/v1/uploads/{upload_id}/files/{path.name}"
        with self._answers():
            answer = _checked(self._http.put(url, content=body(), headers=headers))
        return int(answer["received_bytes"])

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachable(self.base_url, reason) from error


class UploadMemory:
    """Which upload an unfinished push belongs to, in a file between two runs of the command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def recall(self, wanted: dict[str, Any]) -> str | None:
        """The upload of exactly these bytes under this name on this server."""
        try:
            kept = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        return kept["upload_id"] if kept.get("wanted") == wanted else None

    def remember(self, wanted: dict[str, Any], upload_id: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"wanted": wanted, "upload_id": upload_id}))

    def forget(self) -> None:
        self._path.unlink(missing_ok=True)


def describe(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of an adapter's two files, as an upload declares them."""
    files: dict[str, dict[str, Any]] = {}
    for filename in ADAPTER_FILES:
        path = folder / filename
        if not path.is_file():
            raise NotAnAdapter(folder, filename)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files[filename] = {"size_bytes": path.stat().st_size, "sha256": sha256}
    return files


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if not answer.is_success:
        raise ApiRefused(answer)
    try:
        content: dict[str, Any] = answer.json()
    except ValueError:
        raise ServerUnreachable(str(answer.url), "its answer is not JSON") from None
    return content


def _check_stream(answer: httpx.Response) -> None:
    if not answer.is_success:
        answer.read()
        raise ApiRefused(answer)


def _error_object(answer: httpx.Response) -> dict[str, Any]:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:  # a date, which our server never sends
        return None


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
