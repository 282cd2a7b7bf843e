"""The well-behaved tenant of bench.neighbours: what it counts as success, and what as an error."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.neighbours import good

ANSWERS = [
    (200, {"usage": {"completion_tokens": 8}}),
    (503, {"error": {"code": "overloaded"}}),
    (200, {"usage": {"completion_tokens": 8}}),
    (429, {"error": {"code": "rate_limit_exceeded"}}),
]


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a server that gives the answers in turn."""
    answers = iter(ANSWERS)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, body = next(answers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_went_well_is_timed_and_the_rest_counted_by_code(url: str) -> None:
    watched = good.complete(url, "a key", len(ANSWERS) * good.INTERVAL_S)
    figures = watched.figures()
    assert (figures["requests"], figures["success"]) == (4, 0.5)
    assert figures["errors"] == {"overloaded": 1, "rate_limit_exceeded": 1}
    assert watched.num_tokens == 16
    assert 0 < figures["p50"] <= figures["p99"]


def test_nothing_that_listens_is_an_error_and_no_latency() -> None:
    figures = good.complete("http://127.0.0.1:9", "a key", good.INTERVAL_S).figures()
    assert (figures["success"], figures["p50"]) == (0.0, None)
    assert figures["errors"] == {"ConnectError": 1}
