"""The one actor of a pool on a Ray cluster that decides which engines there are.

The coordinator may die, since it can find all its state again: engines are named actors, every
placer repeats how many engines it wants, and the journals to settle lie in the pool's folder.

A pool without placers is shut down: LINGER_S after the last one has deregistered (`goodbye`), and
SILENCE_S after the last poll of one that has not.
"""

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from engine.leaving import is_settled
from server.cluster.actor import EngineActor
from server.cluster.pool import Placed, Pool, Role, first_line
from server.launch.children import Kind
from server.launch.engine_folders import engine_name
from server.pool.control_files import MAX_ENGINES
from server.text.json_object import JsonObject

logger = logging.getLogger(__name__)

TURN_S = 0.25
LINGER_S = 30.0
"""Seconds that a pool outlives its last placer, so that a restarted gateway finds it."""
SILENCE_S = 600.0
"""Seconds without a poll after which a placer counts as gone. They are many, since its gateway may
be alive and only cut off from the cluster.
"""
_PENDING_S = 10.0
_ASK_AGAIN_S = 60.0


class Coordinator:
    """Places engines, in a thread of its own, as the calls of placers request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._wanted: dict[str, tuple[int, float]] = {}  # by placer id: engines, time
        self._linger_until = time.monotonic() + LINGER_S
        self._slots: dict[int, Slot] = _find_slots()
        threading.Thread(target=self._turn_forever, daemon=True).start()

    def join(self, placer_id: str, pool: Mapping[str, Any]) -> str | None:
        """Let a placer join. Returns None, or why its pool does not match that of other placers.

        A placer without others may change the pool's configuration; engines that were started with
        the former one are replaced.
        """
        theirs = Pool(**pool)
        with self._lock:
            has_others = bool(self._wanted.keys() - {placer_id})
            if self._pool and has_others and (refusal := self._pool.refusal(theirs)):
                return refusal
            if not (self._pool and has_others):
                self._pool = theirs
            self._linger_until = time.monotonic() + LINGER_S
        return None

    def poll(self, placer_id: str, wanted: int) -> JsonObject | None:
        """The pool's state for a gateway; None from a coordinator that no placer has joined yet.

        addresses: those of all engines by name, "" where not known.   problems: for the operator.
        """
        with self._lock:
            if self._pool is None:
                return None
            self._wanted[placer_id] = (min(wanted, MAX_ENGINES), time.monotonic())
            return {
                "addresses": {engine_name(k): s.placed.address for k, s in self._slots.items()},
                "problems": sorted(filter(None, (s.problem for s in self._slots.values()))),
            }

    def goodbye(self, placer_id: str) -> None:
        with self._lock:
            self._wanted.pop(placer_id, None)
            self._linger_until = time.monotonic() + LINGER_S

    def _turn_forever(self) -> None:
        while True:
            time.sleep(TURN_S)
            try:
                with self._lock:
                    is_over = self._turn(time.monotonic())
            except Exception:
                # Ray starts this actor again, and all other actors live on.
                logger.exception("a turn of the pool failed")
                os._exit(1)
            if is_over:
                ray.kill(ray.get_runtime_context().current_actor)

    def _turn(self, now: float) -> bool:
        """Place and end engines as needed. Returns whether the pool has shut down."""
        self._wanted = {p: w for p, w in self._wanted.items() if now - w[1] < SILENCE_S}
        is_deserted = not self._wanted and now > self._linger_until
        if is_deserted:
            for slot in self._slots.values():
                slot.role = "leave"
        elif self._pool is not None and self._wanted:
            self._fill(self._pool, max(number for number, _ in self._wanted.values()))
        for number, slot in list(self._slots.items()):
            if slot.turn(now):
                ray.kill(slot.actor)
                del self._slots[number]
        return is_deserted and not self._slots

    def _fill(self, pool: Pool, wanted: int) -> None:
        """Place an engine in each folder up to `wanted`, and a retired one in unsettled others."""
        for number in range(1, MAX_ENGINES + 1):
            kind: Kind | None = "engine" if number <= wanted else None
            if kind is None and not is_settled(_folder(pool, number)):
                kind = "retired"
            slot = self._slots.get(number)
            if slot is not None and (slot.kind, slot.template_id) != (kind, pool.template_id):
                slot.role = "leave"
            elif slot is None and kind is not None:
                self._slots[number] = _place(pool, number, kind)


@dataclass(slots=True)
class Slot:
    """An actor in one engine's folder, and its last answer.

    is_new: the actor has never answered, so it has nothing that could be lost.
    """

    kind: Kind
    template_id: str
    actor: Any
    role: Role = "serve"
    placed: Placed = field(default_factory=Placed)
    problem: str = ""
    is_new: bool = False
    _answer: Any = None
    _asked_at: float = 0.0

    def turn(self, now: float) -> bool:
        """Call the actor, or take its answer to the last call. Returns whether it is gone."""
        if self._answer is None:
            self._answer, self._asked_at = self.actor.tend.remote(self.role), now
        ready, _ = ray.wait([self._answer], timeout=0)
        if not ready:
            return self._wait(now - self._asked_at)
        answer, self._answer = self._answer, None
        try:
            self.placed = Placed(**ray.get(answer))
        except ray.exceptions.ActorDiedError as error:
            logger.warning("%s", error)
            return True
        except ray.exceptions.RayError as error:  # the actor is being started again
            self.problem = f"an engine's actor is away: {first_line(error)}"
            return False
        self.problem = self.placed.problem
        self.is_new = False
        return self.placed.is_gone

    def _wait(self, waited_s: float) -> bool:
        """Wait for the actor's answer. Returns whether the actor is given up: it has found no node
        and is no longer wanted.
        """
        if waited_s > _PENDING_S:
            self.problem = (
                "an engine waits for a node with room for it (see `ray status`), or its node "
                "does not answer"
            )
        if waited_s > _ASK_AGAIN_S:
            self._answer = None
        return self.is_new and self.role == "leave"


def _folder(pool: Pool, number: int) -> Path:
    return Path(pool.pool_dir) / engine_name(number)


def _place(pool: Pool, number: int, kind: Kind) -> Slot:
    """Start an actor on any node with enough resources; Ray restarts it wherever there is one.

    An actor's resources are always on one node, and so are an engine's GPUs.
    """
    is_engine = kind == "engine"
    actor = ray.remote(EngineActor).options(
        # The name is never the same twice: the number's last actor may not be quite gone.
        name=f"{kind}/{number}/{pool.template_id}/{uuid.uuid4().hex[:8]}",
        namespace=pool.namespace,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=pool.num_cpus if is_engine else 0,
        num_gpus=pool.num_gpus if is_engine else 0,
        scheduling_strategy="SPREAD",
    )  # fmt: skip
    started = actor.remote(asdict(pool), number, kind)
    return Slot(kind, pool.template_id, started, is_new=True)


def _find_slots() -> dict[int, Slot]:
    """The actors that an earlier coordinator has left running."""
    slots = {}
    for name in ray.util.list_named_actors():
        kind, *rest = name.split("/")
        if kind == "engine" or kind == "retired":
            number, template_id, _ = rest
            with contextlib.suppress(ValueError):  # the actor has ended meanwhile
                slots[int(number)] = Slot(kind, template_id, ray.get_actor(name))
    return slots
