"""Chorale's gateway on PostgreSQL in front of the paced engine, and that engine alone."""

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gateway.generator import EngineTarget
from bench.gateway.http_client import PROMPT, HttpTarget
from bench.process_tree import find_children
from bench.product import Product, free_port, started, wait_ready
from server.launch.prepare import prepare, resolve_settings
from server.launch.settings import Settings
from server.launch.supervisor import Supervisor
from server.text.tokenizer import Tokenizer

_MODEL_DIR = Path(__file__).parents[2] / "demo" / "model"
_MODEL = "bench"
_ARENA_BYTES = 4 << 30
"""Room for 1,000 streams of 1,000 tokens; nothing is written into it."""
_MUCH = 10**9
"""Value of limits that are counted and never reached."""
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency")


@dataclass(frozen=True)
class Ours:
    """A running gateway. key: key of a tenant with limits on requests, tokens and concurrency."""

    port: int
    key: str
    pid: int

    def target(self, max_tokens: int, *, stream: bool = False) -> HttpTarget:
        return HttpTarget(self.port, self.key, _MODEL, max_tokens, stream)


@contextmanager
def serving(
    folder: Path,
    database_url: str,
    *,
    step_s: float = 0.0,
) -> Iterator[Ours]:
    """Run the gateway.   folder: exists and is empty.   step_s: time from one engine step to the
    next; 0: as short as possible.
    """
    admin_key = f"bench-{secrets.token_hex(16)}"
    settings = _settings(folder) | {"database_url": database_url}
    path, log = folder / "settings.json", folder / "chorale.log"
    path.write_text(json.dumps(settings))
    environment = {
        "PACED_STEP_S": str(step_s), "CHORALE_ADMIN_KEY": admin_key,
        "CHORALE_PEPPER": secrets.token_hex(32),
        "CHORALE_RECEIPT_SIGNING_KEY": secrets.token_hex(32),
    }  # fmt: skip
    with started(
        (sys.executable, "-m", "bench.gateway.ours", str(path)), log, environment
    ) as process:
        product = Product(f"http://127.0.0.1:{settings['port']}", admin_key, process)
        wait_ready(product.url, process, log)
        key = product.create_tenant("bench", **dict.fromkeys(_LIMITS, _MUCH))
        pid = find_children(process.pid, "gateway.json")[0]
        yield Ours(settings["port"], key, pid)


@contextmanager
def engine_alone(folder: Path, *, step_s: float = 0.0) -> Iterator[Path]:
    """Run the same engine without a gateway. Yields its socket.

    The engine ends when nobody is connected for 10 s. folder: exists and is empty.
    """
    data_dir, children = _children(_settings(folder))
    (engine,) = [child for child in children() if child.name == "engine"]
    environment = {**engine.environment, "PACED_STEP_S": str(step_s)}
    with started(engine.command, folder / "engine.log", environment):
        yield data_dir / "engine" / "engine.sock"


def engine_target(socket: Path, max_tokens: int) -> EngineTarget:
    """Return the target for the engine alone, with as many prompt tokens as a chat request has."""
    tokenizer = Tokenizer(_MODEL_DIR)
    text = tokenizer.chat_template.render([{"role": "user", "content": PROMPT}])
    prompt_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    return EngineTarget(socket, prompt_tokens, max_tokens)


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "model": str(_MODEL_DIR), "model_name": _MODEL, "data_dir": str(folder / "data"),
        "port": free_port(), "threads": 1, "max_model_len": 1024,
        "max_num_seqs": 1024, "max_num_batched_tokens": 4096, "drain_timeout_s": 5.0,
        "arena_bytes": _ARENA_BYTES, "swap_bytes": 0, "speculation": "off", "device": "cpu",
        "request_timeout_s": 600.0, "first_token_timeout_s": 600.0,
    }  # fmt: skip


def _children(values: dict[str, Any]) -> tuple[Path, Any]:
    """Return the data's folder, and what makes the children that a supervisor starts."""
    settings = resolve_settings(Settings.model_validate(values))
    return settings.data_dir, prepare(settings, engine_module="bench.gateway.paced_engine")


if __name__ == "__main__":  # `chorale serve` around the paced engine
    with Supervisor(_children(json.loads(Path(sys.argv[1]).read_text()))[1]) as supervisor:
        supervisor.run()
