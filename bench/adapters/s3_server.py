"""`python -m bench.adapters.s3_server`: moto's S3 server in a process of its own, at the lowest
priority, that may be slow on purpose. It ends when its standard input does.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import httpx

_BUCKET = "bucket"
_NICE = 19
_TIMEOUT_S = 30.0

STORAGE_URL = f"s3://{_BUCKET}"


@dataclass(frozen=True)
class S3Server:
    """A running server with an empty bucket."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process finds and may use the server."""
        return {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1",
            "AWS_ENDPOINT_URL": self.url,
        }  # fmt: skip

    def put(self, key: str, data: bytes) -> None:
        """Store an object that anybody may read."""
        self.ask("PUT", f"/{key}", content=data, headers={"x-amz-acl": "public-read"})

    def get(self, key: str) -> bytes:
        """Read an object by plain HTTP, the fastest way to read this server."""
        return self.ask("GET", f"/{key}")

    def ask(self, method: str, path: str, **options: Any) -> bytes:
        """Send a request about an object, or with an empty path about the bucket."""
        url = f"{self.url}/{_BUCKET}{path}"
        answer = httpx.request(method, url, timeout=_TIMEOUT_S, trust_env=False, **options)
        return answer.raise_for_status().content


@contextmanager
def slow_s3(delay_s: float) -> Iterator[S3Server]:
    """Run the server in a child process. delay_s: wait before every answer to a GET."""
    command = [sys.executable, "-m", "bench.adapters.s3_server", str(delay_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        server = S3Server(process.stdout.readline().strip())
        if not server.url:
            raise SystemExit("the S3 server did not start")
        server.ask("PUT", "")
        yield server


def main() -> None:
    # Imported here: whoever uses the server needs neither.
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    os.nice(_NICE)
    moto, delay_s = DomainDispatcherApplication(create_backend_app), float(sys.argv[1])

    def slow(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET":
            time.sleep(delay_s)
        return moto(environ, start)

    server = make_server("127.0.0.1", 0, slow, threaded=True)
    Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"http://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
