"""The base models that settings and gateway name, whether or not they can be served."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from server.launch.model_settings import threads_for
from server.launch.settings import InvalidSetting, Settings
from server.pool.files import ModelChanges
from server.text.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A base model that somebody wants.

    table: what is given for it, which tells whether it has changed.   settings: of this model
    alone; None if the table is wrong, and then `problem` says why.
    """

    name: str
    table: JsonObject
    settings: Settings | None = None
    origin: Literal["settings", "added"] = "settings"
    problem: str = ""


def wanted_models(settings: Settings, changes: ModelChanges) -> list[WantedModel]:
    """The models of the settings, then those that were added under other names.

    Threads that are not given are those that each process has if all these models run.
    """
    found = [
        WantedModel(one.model_id, table, one)
        for one, table in zip(settings.of_models(), settings.given_tables(), strict=True)
    ]
    for table in changes.added:
        added = _added(settings, table)
        if added.name not in {one.name for one in found}:
            found.append(added)
    num_processes = sum(one.settings.most_processes for one in found if one.settings)
    return [_with_threads(one, threads_for(max(1, num_processes))) for one in found]


def _with_threads(wanted: WantedModel, threads: int) -> WantedModel:
    if wanted.settings is None or "threads" in wanted.table:
        return wanted
    return replace(wanted, settings=wanted.settings.model_copy(update={"threads": threads}))


def _added(settings: Settings, table: JsonObject) -> WantedModel:
    name = str(table.get("model_name") or Path(str(table.get("model", ""))).name)
    try:
        one = settings.of_table(table, where="models.json")
    except InvalidSetting as error:
        return WantedModel(name, table, origin="added", problem=str(error))
    return WantedModel(one.model_id, settings.common_with(table), one, origin="added")
