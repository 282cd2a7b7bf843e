"""The messages between the parts of a pool on a Ray cluster; this module needs no Ray.

    gateway's machine          cluster                          each node that has an engine
    placer ──── calls ───────▶ coordinator ──── calls ───────▶ engine's actor
      │                        one, named, detached             one an engine, named, detached
      │ members.json                                              │ process
      ▼ wanted.json                                               ▼
    gateway ◀──────────────── TCP, CURVE ────────────────────── fetcher and engine

Messages on the cluster are plain: numbers, texts, and dicts of them. Keys do not cross the cluster:
the placer writes them to the pool's folder, which all nodes share.
"""

from dataclasses import dataclass
from typing import Literal

from server.launch.placer_config import PlacerConfig

COORDINATOR = "coordinator"
"""Name of the coordinator's actor, in the pool's namespace."""


Role = Literal["serve", "leave"]
"""Task of an engine.   serve: run, and be restarted.   leave: end when all requests have ended and
are billed, or at once if there is no gateway any more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Identity of a pool, which two gateways may share, and the resources that its engines need.

    pool_dir: folder of the journals, at this path on every node.   base_revision: that of the model
    it serves.   template_id: that of the template its engines are started from.
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
    def of_config(cls, config: PlacerConfig, *, has_gpus: bool) -> "Pool":
        """Derive the pool.   has_gpus: whether the cluster has GPUs for device `auto` to use."""
        on_gpus = config.device == "cuda" or (config.device == "auto" and has_gpus)
        return cls(
            pool_id=config.pool_id,
            pool_dir=config.pool_dir,
            base_revision=config.template.config["base_revision"],
            template_id=config.template.template_id,
            num_cpus=1 if on_gpus else config.num_cpus,
            num_gpus=config.num_gpus if on_gpus else 0,
        )

    def refusal(self, other: "Pool") -> str | None:
        """The reason why `other` cannot join; None if it can."""
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
    """An actor's answer.   address: "" until its engine listens.   problem: for the operator."""

    address: str = ""
    problem: str = ""
    is_gone: bool = False


def first_line(error: Exception) -> str:
    """The first line of one of Ray's long messages."""
    return str(error).strip().partition("\n")[0]
