"""A base model as the supervisor runs it, from when somebody wants it until it is gone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from server.launch.homes import Home
from server.launch.model_settings import threads_for
from server.launch.settings import InvalidSetting, Settings
from server.launch.supervisor import ChildSpec
from server.pool.control_files import BaseEntry, ModelChanges
from server.text.json_object import JsonObject


class Processes(Protocol):
    """The processes of one base model; called at every poll.

    is_at_rest: whether nothing runs, and no journal is left to settle.
    """

    def __call__(self) -> list[ChildSpec]: ...

    @property
    def is_at_rest(self) -> bool: ...


@dataclass(slots=True, eq=False)
class SupervisedBase:
    """A base model that somebody wants, or wanted.

    table: what is given for it, which tells whether it has changed.   settings: of this model
    alone; None if the table is wrong, and then `problem` says why.   origin: who wants it.
    home, processes: None until the model is loaded.   gpus: those that its engines take.
    is_vital: whether nothing is served if its engines cannot start.   refusal: why they cannot.
    is_former: it was removed or replaced.
    """

    name: str
    table: JsonObject
    settings: Settings | None = None
    origin: Literal["settings", "added"] = "settings"
    home: Home | None = None
    processes: Processes | None = None
    model_dir: str = ""
    base_revision: str = ""
    gpus: Sequence[str] = ()
    is_vital: bool = False
    is_former: bool = False
    problem: str = ""
    refusal: str = ""

    @property
    def entry(self) -> BaseEntry:
        return BaseEntry(
            name=self.name,
            home=str(self.home.folder) if self.home else "",
            model_dir=self.model_dir,
            base_revision=self.base_revision,
            settings=self.settings.dump_base() if self.settings else {},
            origin=self.origin,
            is_former=self.is_former,
            problem=self.problem,
        )

    def children(self) -> list[ChildSpec]:
        specs = self.processes() if self.processes else []
        return specs if self.is_vital else [replace(spec, on_refusal=self.refuse) for spec in specs]

    def refuse(self, reason: str) -> None:
        """Note that an engine cannot start. What settles a former model's journals tries on."""
        if not self.is_former:
            self.refusal = reason


def wanted_bases(settings: Settings, changes: ModelChanges) -> list[SupervisedBase]:
    """The models of the settings, then those that were added under other names.

    Threads that are not given are those that each process has if all these models run.
    """
    tables = settings.models or ({"model": settings.model},)
    found = [
        SupervisedBase(one.model_id, settings.common_with(table), one)
        for one, table in zip(settings.of_models(), tables, strict=True)
    ]
    for table in changes.added:
        added = _added(settings, table)
        if added.name not in {one.name for one in found}:
            found.append(added)
    num_processes = sum(one.settings.most_processes for one in found if one.settings)
    threads = threads_for(max(1, num_processes))
    for one in found:
        if one.settings and "threads" not in one.table:
            one.settings = one.settings.model_copy(update={"threads": threads})
    return found


def _added(settings: Settings, table: JsonObject) -> SupervisedBase:
    name = str(table.get("model_name") or Path(str(table.get("model", ""))).name)
    try:
        one = settings.of_table(table, where="models.json")
    except InvalidSetting as error:
        return SupervisedBase(name, table, origin="added", problem=str(error))
    return SupervisedBase(one.model_id, settings.common_with(table), one, origin="added")
