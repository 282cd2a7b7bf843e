"""`python -m bench.adapters.s3_server`: an S3 server that is slow on purpose, in its own process.

The server is Moto behind a proxy that waits before every answer (bench.faulty_s3), at the lowest
priority. It ends when its standard input does.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from bench.adapters.tiers import ROOT
from bench.faulty_s3 import CREDENTIALS, faulty_s3

_BUCKET = "bucket"
_NICE = 19
_TIMEOUT_S = 30.0
STORAGE_URL = f"s3://{_BUCKET}"


@dataclass(frozen=True)
class S3Server:
    """A slow S3 server in a process of its own.

    url: URL of the slow proxy.   upstream: URL of the server behind the proxy.
    """

    url: str
    upstream: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process finds and may use the server."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}

    def put(self, key: str, data: bytes) -> None:
        """Stores an object without going through the proxy; anybody may read it."""
        _ask(self.upstream, "PUT", key, data, {"x-amz-acl": "public-read"})

    def get(self, key: str) -> bytes:
        """Reads an object by plain HTTP through the proxy, the fastest way to read this server."""
        return _ask(self.url, "GET", key)


def _ask(
    url: str,
    method: str,
    key: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)) as server:
        server.request(method, f"/{_BUCKET}/{key}", body, headers)
        answer = server.getresponse()
        data = answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"the S3 server answered {answer.status} to {method} {key}")
    return data


@contextmanager
def slow_s3(delay_s: float) -> Iterator[S3Server]:
    """Runs the server in a child process. delay_s: wait before every answer of the proxy."""
    command = [sys.executable, "-m", "bench.adapters.s3_server", "--delay-s", str(delay_s)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the S3 server did not start")
        yield S3Server(**json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.adapters.s3_server")
    parser.add_argument("--delay-s", type=float, required=True)
    options = parser.parse_args()
    os.nice(_NICE)
    with faulty_s3(_BUCKET) as s3:
        s3.delay_s = options.delay_s
        sys.stdout.write(json.dumps({"url": s3.url, "upstream": s3.upstream}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
