"""Chorale's gateway on PostgreSQL, or a bare server, in front of the paced engine."""

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gateway.asked import PROMPT, bare_body, chat_body
from bench.gateway.load import Target
from bench.ports import free_port
from bench.process_tree import find_children
from bench.product import Product, started, wait_ready
from server.launch.plan import prepare, resolve_settings
from server.launch.settings import Settings
from server.text.tokenizer import Tokenizer

_MODEL_DIR = Path(__file__).parents[2] / "demo" / "model"
_MODEL = "bench"
_MUCH = 10**9
"""Value of limits that are counted and never reached."""
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency")


@dataclass(frozen=True)
class Ours:
    """A running gateway. key: key of a tenant with limits on requests, tokens and concurrency."""

    port: int
    key: str
    admin_key: str
    pid: int

    def target(self, max_tokens: int, *, stream: bool = False) -> Target:
        body = chat_body(_MODEL, max_tokens, stream=stream).decode()
        return {"port": self.port, "path": "/v1/chat/completions", "body": body, "key": self.key}


def prompt_tokens() -> int:
    """Number of prompt tokens of every chat request."""
    tokenizer = Tokenizer(_MODEL_DIR)
    text = tokenizer.render([{"role": "user", "content": PROMPT}])
    return len(tokenizer.encode(text, add_special_tokens=False))


@contextmanager
def serving(
    folder: Path,
    database_url: str,
    *,
    step_s: float = 0.0,
    module: str = "bench.gateway.serve",
    **changes: Any,
) -> Iterator[Ours]:
    """Run the gateway.   folder: exists and is empty.   step_s: time from one engine step to the
    next; 0: as short as possible.   changes: settings of `chorale serve`.
    """
    admin_key = f"bench-{secrets.token_hex(16)}"
    settings = _settings(folder) | {"database_url": database_url} | changes
    path, log = folder / "settings.json", folder / "chorale.log"
    path.write_text(json.dumps(settings))
    environment = {
        "PACED_STEP_S": str(step_s), "CHORALE_ADMIN_KEY": admin_key,
        "CHORALE_PEPPER": secrets.token_hex(32),
        "CHORALE_RECEIPT_SIGNING_KEY": secrets.token_hex(32),
    }  # fmt: skip
    with started((sys.executable, "-m", module, str(path)), log, environment) as process:
        product = Product(f"http://127.0.0.1:{settings['port']}", admin_key, process)
        wait_ready(product.url, process, log)
        key = product.create_tenant("bench", **dict.fromkeys(_LIMITS, _MUCH))
        pid = find_children(process.pid, "gateway.json")[0]
        yield Ours(settings["port"], key, admin_key, pid)


@contextmanager
def engine_alone(folder: Path, *, step_s: float = 0.0) -> Iterator[Path]:
    """Run the same engine without a gateway. Yields its socket.

    The engine ends when nobody is connected for 10 s. folder: exists and is empty.
    """
    settings = resolve_settings(Settings.model_validate(_settings(folder)))
    children = prepare(settings, engine_module="bench.gateway.paced_engine")
    (engine,) = [child for child in children() if child.name == "engine"]
    environment = {**engine.environment, "PACED_STEP_S": str(step_s)}
    with started(engine.command, folder / "engine.log", environment):
        yield settings.data_dir / "engine" / "engine.sock"


def engine_target(socket: Path, max_tokens: int) -> Target:
    sizes = {"prompt_tokens": prompt_tokens(), "max_tokens": max_tokens}
    return {"socket": str(socket)} | sizes


@contextmanager
def bare(socket: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Run `bench.gateway.bare` in front of the engine at `socket`. Yields its (port, pid)."""
    port, log = free_port(), folder / "bare.log"
    command = (sys.executable, "-m", "bench.gateway.bare", str(socket), str(port))
    with started(command, log, {}) as process:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        yield port, process.pid


def bare_target(port: int, max_tokens: int, *, stream: bool = False) -> Target:
    body = bare_body(prompt_tokens(), max_tokens, stream=stream).decode()
    return {"port": port, "path": "/v1/chat/completions", "body": body, "key": None}


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "model": str(_MODEL_DIR), "model_name": _MODEL, "data_dir": str(folder / "data"),
        "port": free_port(), "threads": 1, "max_model_len": 1024,
        "max_num_seqs": 1024, "max_num_batched_tokens": 4096, "drain_timeout_s": 5.0,
        "request_timeout_s": 600.0, "first_token_timeout_s": 600.0,
    }  # fmt: skip
