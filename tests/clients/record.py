"""A proxy that records what a client sends, for clients that are too large to install for each run.

For vllm-bench.json: serve the demo's model and adapters, start this before it, and run `vllm bench
serve` with --base-url of this proxy and --num-prompts 1, once for each entry of the file. They
differ in the backend (openai, openai-chat), in --logprobs with --temperature 0, and in the prompt:
one is a list of token ids, for an adapter of --lora-modules.
"""

import argparse
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

Request = dict[str, Any]


class Recorder(ThreadingHTTPServer):
    """Passes requests on to the server at `url`, and gives each answered POST to `record`."""

    def __init__(self, url: str, record: Callable[[Request], None], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.http = httpx.Client(base_url=url, timeout=120)
        self.record = record


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        kept = ("authorization", "content-type")
        headers = {name: value for name, value in self.headers.items() if name.lower() in kept}
        answer = self.server.http.request(self.command, self.path, content=body, headers=headers)
        if self.command == "POST" and answer.is_success:
            self.server.record({"path": self.path, "body": json.loads(body)})
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the server that answers")
    parser.add_argument("file", type=Path, help="where the requests are written, one a line")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    requests: list[Request] = []

    def record(request: Request) -> None:
        requests.append(request)
        lines = ",\n".join(f"  {json.dumps(request)}" for request in requests)
        args.file.write_text(f"[\n{lines}\n]\n")

    with Recorder(args.url, record, args.port) as proxy:
        proxy.serve_forever()


if __name__ == "__main__":
    main()
