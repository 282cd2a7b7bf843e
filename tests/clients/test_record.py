"""A recorded request is what the client sent, and the client gets the server's answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx

from tests.clients.record import Recorder


class Echo(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400 if b"bad" in body else 200)
        self.send_header("content-type", self.headers["authorization"])
        self.end_headers()
        self.wfile.write(b"data: " + body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def running(server: HTTPServer) -> Iterator[str]:
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_what_is_answered_is_recorded_as_it_was_sent() -> None:
    recorded: list[dict[str, Any]] = []
    with (
        running(HTTPServer(("127.0.0.1", 0), Echo)) as url,
        running(Recorder(url, recorded.append)) as proxy,
        httpx.Client(base_url=proxy, headers={"authorization": "text/key"}) as client,
    ):
        answer = client.post("/v1/completions", json={"prompt": [40, 41], "logprobs": None})
        refused = client.post("/v1/completions", json={"prompt": "bad"})
    assert answer.text == 'data: {"prompt":[40,41],"logprobs":null}'
    assert (answer.headers["content-type"], refused.status_code) == ("text/key", 400)
    assert recorded == [{"path": "/v1/completions", "body": {"prompt": [40, 41], "logprobs": None}}]
