"""The engine and fetcher processes, on this machine or on a node of a cluster.

Each process gets no more environment variables than it needs.
"""

import contextlib
import json
import os
import secrets
import sys
from pathlib import Path

from server.launch.supervisor import ChildSpec
from server.text.json_object import JsonObject

# Prefixes of the environment variables that only some of the processes may see.
STORE_CREDENTIALS = ("AWS_",)
CLUSTER = ("RAY_",)
FIRST_BEAT_S = 300.0
"""Longest time from a start to the first beat: imports come first, from a disk that may be slow."""
GATEWAY_ONLY = ("CHORALE_", "PG", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_", "OTEL_")


def fetcher_child(
    name: str = "fetcher",
    *,
    socket: Path,
    storage: str,
    cache: Path,
    quota_bytes: int,
    max_fetches: int,
    reserve_bytes: int | None = None,
) -> ChildSpec:
    """The fetcher's process. The object store's credentials are the only ones it sees.

    reserve_bytes: what it leaves free on the disk; None for the default of FreeSpace.
    """
    command: tuple[str, ...] = (
        sys.executable, "-m", "lora.fetch", "--socket", str(socket), "--storage", storage,
        "--cache", str(cache), "--quota-bytes", str(quota_bytes), "--max-fetches", str(max_fetches),
    )  # fmt: skip
    if reserve_bytes is not None:
        command += ("--reserve-bytes", str(reserve_bytes))
    own = environment(without=(*GATEWAY_ONLY, *CLUSTER))
    return ChildSpec(name, command, own, first_beat_s=FIRST_BEAT_S)


def engine_child(name: str, module: str, config_path: Path, threads: int) -> ChildSpec:
    """An engine's process, which sees no credentials."""
    command = (sys.executable, "-m", module, str(config_path))
    own = environment(without=(*GATEWAY_ONLY, *STORE_CREDENTIALS, *CLUSTER))
    own["OMP_NUM_THREADS"] = str(threads)
    return ChildSpec(name, command, own, stage=1, first_beat_s=FIRST_BEAT_S)


def environment(without: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(without)}


def base_revision_of(path: Path) -> str | None:
    """The base revision in an engine's configuration file; None if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text())["base_revision"])
    return None


def write_private(path: Path, content: JsonObject | bytes) -> None:
    """Write and sync bytes, or JSON, that may hold keys and passwords, with mode 0600."""
    written = content if isinstance(content, bytes) else json.dumps(content, indent=2).encode()
    # Each writer has a draft of its own, since several gateways may write at once.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
