"""The process that fetches adapters for engines: `python -m lora.fetch`."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parent.parent.parent
_MAX_FETCHES = 8  # the default of `chorale serve`
_START_S = 30.0
_LOOK_S = 0.01


@contextmanager
def fetcher(
    listens_at: Path,
    cache: Path,
    storage_url: str,
    *,
    quota_bytes: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Runs a fetcher that listens.   cache: folder where engines read, at most `quota_bytes`."""
    command = [
        sys.executable, "-m", "lora.fetch",
        "--socket", str(listens_at),
        "--storage", storage_url,
        "--cache", str(cache),
        "--quota-bytes", str(quota_bytes),
        "--max-fetches", str(_MAX_FETCHES),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **(environment or {})})
    try:
        _wait_until_listening(process, listens_at)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_until_listening(process: subprocess.Popen[bytes], path: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(_LOOK_S)
    raise SystemExit("the fetcher did not start")
