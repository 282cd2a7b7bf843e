"""What the parts of a pool on a Ray cluster tell each other; nothing here needs Ray.

    gateway's machine          cluster                          each node that has an engine
    placer ──── calls ───────▶ coordinator ──── calls ───────▶ engine's actor
      │                        one, named, detached             one an engine, named, detached
      │ members.json                                              │ process
      ▼ wanted.json                                               ▼
    gateway ◀──────────────── TCP, CURVE ────────────────────── fetcher and engine

What crosses the cluster is plain: numbers, texts, and dicts of them. Keys do not: the placer lays
them down in the pool's folder, which all of them share.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

COORDINATOR = "coordinator"
"""Its name, in the pool's namespace."""

Kind = Literal["engine", "retired"]
"""What an actor runs in an engine's folder: the engine, or what is left of one that has left."""

Role = Literal["serve", "leave"]
"""serve: run, and be started again.   leave: end when all requests have ended and are billed, or at
once where no gateway is there any more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What makes two gateways' pools the same one, and what an engine of it needs from a node.

    pool_dir: of journals; at this path on every node.   base_revision: of the model it serves.
    template_id: of what its engines are started with.
    """

    pool_id: str
    pool_dir: str
    base_revision: str
    template_id: str
    num_cpus: int
    num_gpus: int

    @property
    def namespace(self) -> str:
        return f"chorale-{self.pool_id}"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Pool":
        return cls(**said)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def refusal(self, other: "Pool") -> str | None:
        """Why `other` cannot join; None where it can."""
        for name in ("pool_dir", "base_revision"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return (
                    f"The pool of this installation runs with {name} {ours}, not {theirs}; give "
                    "all its gateways the same, or stop all of them first."
                )
        return None


@dataclass(frozen=True, slots=True)
class Placed:
    """What an actor says. address: "" until its engine listens.   problem: for the operator."""

    address: str = ""
    problem: str = ""
    is_gone: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTemplate:
    """What all engines of a pool are started with; a file in the pool's folder, mode 0600.

    model: a folder, or a hub id.   config: the fields of engine.config.EngineConfig but for those
    that a node gives.   modules: `python -m` what, by kind.   stop_timeout_s: SIGTERM to SIGKILL.
    """

    model: str
    model_id: str
    base_revision: str
    config: dict[str, Any]
    storage: str
    disk_cache_bytes: int
    max_fetches: int
    threads: int
    stop_timeout_s: float
    modules: dict[Kind, str]

    @property
    def template_id(self) -> str:
        """Another for engines that are started with anything else."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @staticmethod
    def path(pool_dir: Path) -> Path:
        return pool_dir / "pool" / "template.json"

    @staticmethod
    def vocabulary_path(pool_dir: Path) -> Path:
        return pool_dir / "pool" / "vocabulary"

    def publish(self, pool_dir: Path) -> None:
        """It, and the vocabulary that it names, for all nodes to read."""
        path = self.path(pool_dir)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        vocabulary = Path(self.config["vocabulary_path"]).read_bytes()
        _write_private(self.vocabulary_path(pool_dir), vocabulary)
        _write_private(path, json.dumps(asdict(self), indent=2).encode())

    @classmethod
    def read(cls, pool_dir: Path) -> "EngineTemplate":
        """Raises OSError."""
        return cls(**json.loads(cls.path(pool_dir).read_text()))


def first_line(error: Exception) -> str:
    """Of what Ray has to say at length."""
    return str(error).strip().partition("\n")[0]


def _write_private(path: Path, content: bytes) -> None:
    # Several gateways may write at once, each a draft of its own.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    draft.rename(path)
