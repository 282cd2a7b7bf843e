"""Follows the supervisor's list of base models: serves new ones, and lets go of former ones.

The operator's changes go the other way: they are written to a file that the supervisor reads, and
so do other gateways of the machine.
"""

import asyncio
import fcntl
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from registry.errors import Conflict, NotFound
from server.database.database import DatabaseError
from server.inference.bases import Bases
from server.inference.served_base import ServedBase
from server.pool.control_files import BaseEntry, ModelChanges, bases_file, changes_file
from server.pool.engines import Engines
from server.text.json_object import JsonObject

logger = logging.getLogger(__name__)

TURN_S = 0.25
MAX_MODELS = 32
"""Most base models that may be added while the gateway runs."""

BaseState = Literal[
    "preparing", "starting", "serving", "asleep", "draining", "drained", "leaving", "failed"
]


class BaseFollower:
    """Keeps `bases` as the supervisor's file says.

    serve: loads a base model and makes its parts; called on a thread.
    connect: makes the engines of a base model of which nothing but journals is left.
    announce: called with every base model before it takes requests.
    """

    def __init__(
        self,
        bases: Bases,
        data_dir: Path,
        serve: Callable[[BaseEntry], ServedBase],
        connect: Callable[[BaseEntry], Engines],
        announce: Callable[[ServedBase], Awaitable[None]],
    ) -> None:
        self._bases = bases
        self._listed, self._asked = bases_file(data_dir), changes_file(data_dir)
        self._serve = serve
        self._connect = connect
        self._announce = announce
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._unloadable: list[BaseEntry] = []

    # ---- start, end, and what is looked for ----

    async def start(self) -> None:
        """Connect to the engines of the base models that there are."""
        self._follow_changes()
        # The first that has a revision is the one that is named for it.
        for base in reversed(list(self._bases)):
            await self._begin(base)

    async def close(self) -> None:
        for task in self._keeping.values():
            task.cancel()
        await asyncio.gather(*self._keeping.values(), return_exceptions=True)
        for base in self._bases:
            base.keeper.leave()
        for engines in self._bases.pools.values():
            await engines.close()

    async def look(self) -> None:
        """Take over what has changed since the last call."""
        self._follow_changes()
        if self._listed.look():
            try:
                await self._take_over(self._listed.content)
            except OSError as error:
                logger.error("%s", error)
            except DatabaseError as error:  # the next turn tries again
                self._listed.look_again()
                logger.warning("a base model cannot be taken in now: %s", error)
                return
        self._bases.call_off_former()

    # ---- the operator's changes ----

    def state_of(self, entry: BaseEntry) -> BaseState:
        """The state of a base model, for its operator."""
        base = self._bases.at(entry.home)
        if entry.is_former:
            return "leaving"
        if base is None:
            return "failed" if entry.problem or entry in self._unloadable else "preparing"
        if base.keeper.state == "closed":
            is_over = base.keeper.is_empty and not base.engines.is_ready
            return "drained" if is_over else "draining"
        if base.keeper.state == "asleep":
            return "asleep"
        return "serving" if base.engines.is_ready else "starting"

    def add(self, table: JsonObject, name: str) -> bool:
        """Add a base model, or replace one that was added.   table: its settings.

        Returns False if it is there already with exactly these settings. Raises Conflict for a
        base model of the settings, and for one too many.
        """
        self._check_added(name)
        table = {**table, "model_name": name}
        with self._changing() as changes:
            is_changed = table not in changes.added
            others = _without(name, changes)
            if len(others.added) >= MAX_MODELS:
                raise Conflict(
                    f"{MAX_MODELS} base models have been added; remove one first.",
                    code="max_models",
                )
            self._asked.write(replace(others, added=(*others.added, table)))
        self._open(name)
        return is_changed

    def remove(self, name: str) -> None:
        """Remove a base model that was added. Raises NotFound, Conflict."""
        self._check_added(name)
        with self._changing() as changes:
            others = _without(name, changes)
            if others.added == changes.added:
                raise _not_found(name)
            self._asked.write(others)

    def drain(self, name: str) -> BaseEntry:
        """Have a base model take no requests, and its engines end. Raises NotFound."""
        entry = self._entry(name)
        with self._changing() as changes:
            if name not in changes.drained:
                self._asked.write(replace(changes, drained=(*changes.drained, name)))
        if base := self._bases.named(name):
            base.keeper.close()
        return entry

    def resume(self, name: str) -> BaseEntry:
        """Have a drained base model serve again. Raises NotFound."""
        entry = self._entry(name)
        with self._changing() as changes:
            self._asked.write(replace(changes, drained=_without(name, changes).drained))
        self._open(name)
        return entry

    # ---- internals ----

    async def _take_over(self, entries: Sequence[BaseEntry]) -> None:
        for home in {entry.home for entry in self._bases.entries} - {e.home for e in entries}:
            if task := self._keeping.pop(home, None):
                task.cancel()
        for engines in self._bases.follow(entries):
            await engines.close()
        self._unloadable = [entry for entry in self._unloadable if entry in entries]
        for entry in entries:
            if entry.home not in self._bases.pools and entry not in self._unloadable:
                await self._take_in(entry)

    async def _take_in(self, entry: BaseEntry) -> None:
        if entry.model_dir:
            try:
                base = await asyncio.to_thread(self._serve, entry)
            except Exception as error:
                # The supervisor has loaded the same files; they must have changed since.
                logger.exception("%s cannot be served: %s", entry.name, error)
                self._unloadable.append(entry)
                return
            await self._begin(base)
            self._bases.add(base)
        elif entry.is_former:
            engines = self._bases.pools[entry.home] = self._connect(entry)
            await engines.start()

    async def _begin(self, base: ServedBase) -> None:
        if base.model_id in self._asked.content.drained:
            base.keeper.close()
        await self._announce(base)
        await base.engines.start()
        self._keeping[base.home] = asyncio.create_task(base.keeper.run())

    def _open(self, name: str) -> None:
        if base := self._bases.named(name):
            base.keeper.open()

    def _entry(self, name: str) -> BaseEntry:
        found = [it for it in self._bases.entries if it.name == name and not it.is_former]
        if found:
            # One that is there comes before its successor that is being prepared.
            return max(found, key=lambda entry: self._bases.at(entry.home) is not None)
        raise _not_found(name)

    def _check_added(self, name: str) -> None:
        for entry in self._bases.entries:
            if entry.name == name and not entry.is_former and entry.origin == "settings":
                raise Conflict(
                    f"{name} is a base model of the server's settings: change it there, and send "
                    "SIGHUP to `chorale serve`. Draining it needs no change of the settings.",
                    code="model_of_the_settings",
                )

    @contextmanager
    def _changing(self) -> Iterator[ModelChanges]:
        """Keep other gateways of the machine from the file, and know what they have changed."""
        with self._asked.path.with_suffix(".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._follow_changes()
            yield self._asked.content

    def _follow_changes(self) -> None:
        """Take over what another gateway has written, or one that ran before."""
        before = self._asked.content.drained
        if not self._asked.look():
            return
        for base in self._bases.current:
            if base.model_id in self._asked.content.drained:
                base.keeper.close()
            elif base.model_id in before:
                base.keeper.open()


def _not_found(name: str) -> NotFound:
    message = f"There is no base model {name!r}; GET /admin/v1/models lists them."
    return NotFound(message, code="base_model_not_found", param="base_model")


def _without(name: str, changes: ModelChanges) -> ModelChanges:
    return ModelChanges(
        tuple(table for table in changes.added if table.get("model_name") != name),
        tuple(other for other in changes.drained if other != name),
    )
