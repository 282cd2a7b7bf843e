"""An S3 store that fails on demand: moto's server behind a proxy that makes the faults.

    with faulty_s3() as s3:                     # moto and the proxy, each in threads
        start_something(AWS_ENDPOINT_URL=s3.url, **CREDENTIALS)
        s3.fail("unavailable", times=2)                 # the next two GETs of objects
        s3.fail("hang", key="tenants/t/")               # every GET below a prefix, until cleared
        s3.delay_s = 0.2                                # every request is delayed
        s3.clear()                                      # no faults any more; what hangs goes on
        s3.count(key), s3.bytes_asked(key)              # requests and bytes since the start

Clients need nothing but the URL, so they may be other processes. Only GETs of objects fail unless
another method is named: uploads and listings go on.
"""

import contextlib
import http.client
import logging
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from moto.server import ThreadedMotoServer

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "NO_PROXY": "127.0.0.1",
}

Kind = Literal[
    "unavailable", "delay", "hang", "stall", "truncate", "short", "wrong_bytes", "reset", "empty",
    "ignore_range",
]  # fmt: skip
"""unavailable: 503 SlowDown.   delay: a wait of `seconds` before the answer.   hang: no answer.
stall: headers, half of the body, then nothing.   truncate: the same, and the connection ends.
short: half of the body, as if it were all.   wrong_bytes: the same length, every byte changed.
reset: RST instead of an answer.   empty: 200 without a body.   ignore_range: 200, the whole object.
"""

_UPLOAD_ID = re.compile("<UploadId>(.*?)</UploadId>")
_BEGUN = re.compile("(<UploadId>(.*?)</UploadId>.*?<Initiated>)(.*?)(</Initiated>)", re.DOTALL)
_OTHER_BYTES = bytes(255 - byte for byte in range(256))
_UPSTREAM_TIMEOUT_S = 30.0
_NOT_FORWARDED = {"connection", "expect", "host", "transfer-encoding"}
_NOT_ANSWERED = {"connection", "content-length", "date", "server", "transfer-encoding"}


@dataclass
class Fault:
    """A fault that the next matching requests meet.

    times: requests still to fail; None: all, until cleared.   key: prefix of their keys.
    """

    kind: Kind
    times: int | None
    key: str
    method: str
    seconds: float
    met: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Request:
    """A request that arrived. size_bytes: bytes that a GET got from upstream, faults aside."""

    method: str
    key: str
    interval: str | None
    size_bytes: int


@dataclass(frozen=True)
class Refusal:
    """An error in the form in which S3 answers it."""

    status: int
    code: str

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{self.code}</Code></Error>'
        return self.status, {"Content-Type": "application/xml"}, body.encode()


Gate = Callable[[str, str, Mapping[str, str], bytes], Refusal | None]
"""Returns the refusal of a request, or None, given method, target, headers (lower case), body."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs errors other than lost connections: tests kill clients, which then hang up."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FaultyS3:
    """The proxy. url: value for AWS_ENDPOINT_URL.   delay_s: wait before every answer.

    begun_at: when each multipart upload was begun, by its id. Moto reports 2010 for every upload,
    so a sweep of old uploads would end uploads that have just begun.
    """

    def __init__(self, upstream: str, gate: Gate | None = None) -> None:
        self.upstream = upstream
        self.gate = gate
        self.delay_s = 0.0
        self.requests: list[Request] = []
        self.begun_at: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._let_go = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def fail(
        self,
        kind: Kind,
        *,
        times: int | None = None,
        key: str = "",
        method: str = "GET",
        seconds: float = 0.0,
    ) -> threading.Event:
        """Make the next `times` matching requests fail (None: all); earlier faults come first.

        The returned event is set when the first such request has arrived.
        """
        fault = Fault(kind, times, key, method, seconds)
        with self._lock:
            self._faults.append(fault)
        return fault.met

    def clear(self) -> None:
        """Remove all faults; requests that hang or are delayed go on at once."""
        with self._lock:
            self._faults.clear()
            self._let_go.set()
            self._let_go = threading.Event()

    def count(self, key: str = "", method: str = "GET") -> int:
        """Number of requests that have arrived for keys that start with `key`."""
        return len(self._matching(key, method))

    def bytes_asked(self, key: str = "") -> int:
        """Bytes that all GETs of keys that start with `key` would have got without faults."""
        return sum(request.size_bytes for request in self._matching(key, "GET"))

    def close(self) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()

    def _matching(self, key: str, method: str) -> list[Request]:
        with self._lock:
            return [r for r in self.requests if r.method == method and r.key.startswith(key)]

    def _take_fault(self, method: str, key: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.method == method and key and key.startswith(fault.key):
                    fault.met.set()
                    if fault.times is not None:
                        fault.times -= 1
                        if not fault.times:
                            self._faults.remove(fault)
                    return fault
        return None

    def _wait(self, seconds: float | None) -> None:
        """Wait for `seconds` (None: without limit), or until the faults are cleared."""
        self._let_go.wait(seconds)

    def _handler(self) -> type["_Handler"]:
        return type("Handler", (_Handler,), {"proxy": self})


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultyS3
    protocol_version = "HTTP/1.1"
    # An answer's headers and body are two writes; together they would wait for the client's ACK.
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def _proxy(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
        fault = self.proxy._take_fault(self.command, key)
        kind = fault.kind if fault else None
        refusal = self._refuse(body)
        status, headers, answer = (
            refusal.answer() if refusal else self._ask(body, whole=kind == "ignore_range")
        )
        answer = self._with_true_times(answer)
        got = len(answer) if self.command == "GET" and status < 300 else 0
        with self.proxy._lock:
            interval = self.headers.get("Range")
            self.proxy.requests.append(Request(self.command, key, interval, got))
        if self.proxy.delay_s:
            self.proxy._wait(self.proxy.delay_s)
        if fault:
            status, headers, answer = self._spoil(fault, status, headers, answer)
        with contextlib.suppress(OSError):  # the client may have given up
            self._answer(kind, status, headers, answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _proxy

    def _refuse(self, body: bytes) -> Refusal | None:
        if self.proxy.gate is None:
            return None
        headers = {n.lower(): ",".join(self.headers.get_all(n, ())) for n in self.headers}
        return self.proxy.gate(self.command, self.path, headers, body)

    def _ask(self, body: bytes, whole: bool) -> tuple[int, dict[str, str], bytes]:
        """Forward the request to the store and return its answer. whole: ignore the range."""
        host = urlsplit(self.proxy.upstream).netloc
        upstream = http.client.HTTPConnection(host, timeout=_UPSTREAM_TIMEOUT_S)
        left_out = _NOT_FORWARDED | ({"range"} if whole else set())
        headers = {n: v for n, v in self.headers.items() if n.lower() not in left_out}
        with contextlib.closing(upstream):
            upstream.request(self.command, self.path, body or None, headers)
            response = upstream.getresponse()
            answer = response.read()
            kept = {n: v for n, v in response.getheaders() if n.lower() not in _NOT_ANSWERED}
            length = response.getheader("Content-Length")
        if self.command == "HEAD" and length is not None:
            kept["Content-Length"] = length
        return response.status, kept, answer

    def _with_true_times(self, answer: bytes) -> bytes:
        """Return `answer`; a list of multipart uploads gets the times at which they were begun."""
        if "uploads" not in parse_qs(urlsplit(self.path).query, keep_blank_values=True):
            return answer
        text, begun_at = answer.decode(), self.proxy.begun_at
        if self.command == "POST" and (begun := _UPLOAD_ID.search(text)):
            begun_at[begun[1]] = datetime.now(UTC).isoformat()
        return _BEGUN.sub(lambda m: f"{m[1]}{begun_at[m[2]]}{m[4]}", text).encode()

    def _spoil(
        self, fault: Fault, status: int, headers: dict[str, str], answer: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the answer as the fault changes it before it is sent."""
        if fault.kind == "unavailable":
            return Refusal(503, "SlowDown").answer()
        if fault.kind == "delay":
            self.proxy._wait(fault.seconds)
        elif fault.kind == "hang":
            self.proxy._wait(None)
        elif fault.kind == "short":
            return status, _cut_range(headers, len(answer) // 2), answer[: len(answer) // 2]
        elif fault.kind == "wrong_bytes":
            return status, headers, answer.translate(_OTHER_BYTES)
        elif fault.kind == "empty":
            return 200, {n: v for n, v in headers.items() if n.lower() != "content-range"}, b""
        return status, headers, answer

    def _answer(
        self, kind: Kind | None, status: int, headers: dict[str, str], answer: bytes
    ) -> None:
        if kind == "reset":
            self._reset()
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if kind in ("stall", "truncate"):
            self.wfile.write(answer[: len(answer) // 2])
            if kind == "stall":
                self.proxy._wait(None)
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(answer)

    def _reset(self) -> None:
        """Close with RST: a linger of zero seconds."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True


def _cut_range(headers: dict[str, str], num_bytes: int) -> dict[str, str]:
    """Return headers whose content range ends after `num_bytes`."""

    def cut(match: re.Match[str]) -> str:
        return f"bytes {match[1]}-{int(match[1]) + num_bytes - 1}/"

    return {n: re.sub(r"bytes (\d+)-\d+/", cut, v) for n, v in headers.items()}


@contextlib.contextmanager
def faulty_s3(bucket: str = "bucket", gate: Gate | None = None) -> Iterator[FaultyS3]:
    """Run Moto with an empty bucket, behind a proxy without faults. gate: may refuse requests."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # INFO is a line for every request
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    proxy = FaultyS3(f"http://{host}:{port}", gate)
    try:
        make_bucket = http.client.HTTPConnection(host, port, timeout=_UPSTREAM_TIMEOUT_S)
        with contextlib.closing(make_bucket):
            make_bucket.request("PUT", f"/{bucket}")
            assert make_bucket.getresponse().status == 200
        yield proxy
    finally:
        proxy.close()
        moto.stop()
