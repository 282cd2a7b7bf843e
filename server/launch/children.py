"""The engine and fetcher processes, on this machine or on a node of a cluster.

Each process gets no more environment variables than it needs.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Literal

from registry.whole_files import write_whole
from server.launch.supervisor import ChildSpec
from server.text.json_object import JsonObject

# Prefixes of the environment variables that only some of the processes may see.
STORE_CREDENTIALS = ("AWS_",)
CLUSTER = ("RAY_",)
FIRST_BEAT_S = 300.0
"""Longest time from a start to the first beat: imports come first, from a disk that may be slow."""
GATEWAY_ONLY = ("CHORALE_", "PG", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_", "OTEL_")

Kind = Literal["engine", "retired"]
"""Process that runs in an engine's folder: the engine, or one without a model that lets the journal
of an engine that has left be settled.
"""


def fetcher_child(
    config: JsonObject, storage: str, name: str = "fetcher", reserve_bytes: int | None = None
) -> ChildSpec:
    """The fetcher's process. The object store's credentials are the only ones it sees.

    config: of its engines.   reserve_bytes: what it leaves free on the disk; None for the default
    of FreeSpace.
    """
    command: tuple[str, ...] = (
        sys.executable, "-m", "lora.fetch", "--socket", config["fetcher_socket"],
        "--storage", storage, "--cache", config["adapter_cache_dir"],
        "--quota-bytes", str(config["disk_cache_bytes"]),
        "--max-fetches", str(config["max_fetches"]),
    )  # fmt: skip
    if reserve_bytes is not None:
        command += ("--reserve-bytes", str(reserve_bytes))
    own = environment(without=(*GATEWAY_ONLY, *CLUSTER))
    return ChildSpec(name, command, own, first_beat_s=FIRST_BEAT_S)


def engine_child(
    name: str, kind: Kind, path: Path, config: JsonObject, module: str = "engine"
) -> ChildSpec:
    """An engine's process, which sees no credentials.   path: where its configuration is written.

    config: fields of engine.config.EngineConfig by name, since the engine reads them from a file.
    module: Python module of the engine.
    """
    threads = config["threads"]
    if kind == "retired":
        module, threads = "engine.retired", 1
        # The engine's open requests ran on the model that it was started with.
        config = {**config, "base_revision": base_revision_of(path) or config["base_revision"]}
    write_private(path, config)
    command = (sys.executable, "-m", module, str(path))
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
    write_whole(path, written, sync=True)
