"""deploy/haproxy.cfg in front of a server that answers every request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from tests.e2e.composed import balanced

OPERATORS_PATHS = (
    "/console/operator", "/console/operator/tenants", "/console/%6fperator", "/admin/v1/problems",
    "/%61dmin/v1/tenants", "/metrics",
)  # fmt: skip
PATHS = ("/console", "/console/sign-in", "/v1/models")
OPERATOR, STRANGER = "127.0.0.1", "127.0.0.2"


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing about requests."""


@contextmanager
def answering() -> Iterator[list[SimpleNamespace]]:
    """Run a server; yield it as the two machines of the balancer."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield [SimpleNamespace(name=f"chorale-{i}", port=server.server_port) for i in (1, 2)]
        server.shutdown()
        thread.join()


def statuses(url: str, host: str, paths: tuple[str, ...]) -> set[int]:
    """Ask for paths from an address of this machine; return the answers' statuses."""
    found = set()
    for path in paths:
        port = urlsplit(url).port
        client = HTTPConnection("127.0.0.1", port, timeout=10, source_address=(host, 0))
        client.request("GET", path)
        found.add(client.getresponse().status)
        client.close()
    return found


@pytest.mark.parametrize(("operators", "seen"), [("always_false", 404), (f"src {OPERATOR}", 200)])
def test_what_is_the_operators_is_there_for_the_network_that_the_rule_names_alone(
    tmp_path: Path, operators: str, seen: int
) -> None:
    with answering() as machines, balanced(machines, tmp_path, operators) as url:
        assert statuses(url, OPERATOR, OPERATORS_PATHS) == {seen}
        assert statuses(url, STRANGER, OPERATORS_PATHS) == {404}
        assert statuses(url, STRANGER, PATHS) == {200}
