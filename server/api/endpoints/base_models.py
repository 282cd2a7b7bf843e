"""Routes for operators: base models are listed, added, drained, replaced and removed."""

import json
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from registry.catalog.audit import record_audit
from registry.errors import Invalid
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import BasesDep, DatabaseDep, FollowerDep, SettingsDep, operators_router
from server.database.clock import now_ms
from server.database.database import Database
from server.inference.base_follower import BaseFollower, BaseState
from server.inference.bases import Bases
from server.launch.settings import InvalidSetting, Settings
from server.pool.control_files import BaseEntry
from server.text.json_object import JsonObject

router = operators_router()


class _NewBaseModel(BodyFields):
    """A base model to serve.

    name: the name that clients ask for.   model: a folder on the server, or a hub id.
    settings: other keys of its table in chorale.toml, such as quantization, with their values.
    """

    name: str = Field(min_length=1, max_length=256)
    model: str = Field(min_length=1, max_length=4096)
    settings: dict[str, JsonValue] = Field(default_factory=dict, max_length=256)


class BaseModelAnswer(Answer):
    """A base model, as its operator sees it.

    state: preparing, its files are read; starting, no engine takes requests yet; draining and
    leaving, its last requests end; failed, `problem` says why.
    origin: whether the server's settings name it, or it was added while the server ran.
    home: the folder of its engines on the server, which a replacement has another of.
    engines: those that take requests.   requests_here: requests under way in this gateway.
    """

    object: Literal["base_model"] = "base_model"
    name: str = Field(examples=["smollm2"])
    state: BaseState
    origin: Literal["settings", "added"]
    home: str = Field(examples=["/var/lib/chorale/bases/smollm2-3c3c3c3c"])
    base_revision: str | None = Field(examples=["3c" * 32])
    max_model_len: int | None = Field(examples=[8192])
    engines: int = Field(examples=[1])
    requests_here: int = Field(examples=[3])
    problem: str | None = Field(examples=[None])


class BaseModelAdded(Answer):
    """The answer to a base model that is being added.

    is_changed: false if it is there already, with exactly these settings.
    """

    object: Literal["base_model.added"] = "base_model.added"
    name: str = Field(examples=["smollm2"])
    is_changed: bool


class BaseModelRemoved(Answer):
    """The answer to a base model that is being removed."""

    object: Literal["base_model.removed"] = "base_model.removed"
    name: str = Field(examples=["smollm2"])


class BaseModelList(ListAnswer[BaseModelAnswer]):
    """All base models, those that are leaving included."""


@router.get("/models")
async def list_base_models(bases: BasesDep, follower: FollowerDep) -> BaseModelList:
    """List the base models, with what each is doing."""
    return BaseModelList(data=[_view(bases, follower, entry) for entry in bases.entries])


@router.post("/models", status_code=202)
async def add_base_model(
    follower: FollowerDep,
    settings: SettingsDep,
    database: DatabaseDep,
    body: Annotated[_NewBaseModel, json_body(_NewBaseModel)],
) -> BaseModelAdded:
    """Add a base model, or replace one that was added: `GET /admin/v1/models` shows how it comes.

    Of a replaced one, requests under way end where they are; new ones go to the new one as soon as
    it has an engine.
    """
    table = {**body.settings, "model": body.model, "model_name": body.name}
    _check(settings, table)
    is_changed = follower.add(table, body.name)
    await _record(database, "base_model.add", body.name, json.dumps(table))
    return BaseModelAdded(name=body.name, is_changed=is_changed)


@router.post("/models/{base_model:path}/drain")
async def drain_base_model(
    base_model: str, bases: BasesDep, follower: FollowerDep, database: DatabaseDep
) -> BaseModelAnswer:
    """Have a base model take no new requests; its engines end with the last one under way."""
    entry = follower.drain(base_model)
    await _record(database, "base_model.drain", base_model)
    return _view(bases, follower, entry)


@router.post("/models/{base_model:path}/resume")
async def resume_base_model(
    base_model: str, bases: BasesDep, follower: FollowerDep, database: DatabaseDep
) -> BaseModelAnswer:
    """Have a drained base model serve again."""
    entry = follower.resume(base_model)
    await _record(database, "base_model.resume", base_model)
    return _view(bases, follower, entry)


@router.delete("/models/{base_model:path}")
async def remove_base_model(
    base_model: str, follower: FollowerDep, database: DatabaseDep
) -> BaseModelRemoved:
    """Remove a base model that was added; its last requests end, and are billed."""
    follower.remove(base_model)
    await _record(database, "base_model.remove", base_model)
    return BaseModelRemoved(name=base_model)


async def _record(database: Database, action: str, name: str, detail: str = "") -> None:
    """Write a line of the audit log. The change itself is in a file that the supervisor reads."""
    await database.write(
        lambda conn: record_audit(
            conn, None, action, detail, target=name, at_ms=now_ms(), actor="operator"
        )
    )


def _check(settings: Settings, table: JsonObject) -> None:
    """Raise a 400 for a setting that a base model cannot have; its path begins the message."""
    try:
        settings.of_table(table, "settings.", "the request")
    except InvalidSetting as error:
        param = str(error).partition(" ")[0].rstrip(":")
        raise Invalid(f"{error}.", param=param) from None


def _view(bases: Bases, follower: BaseFollower, entry: BaseEntry) -> BaseModelAnswer:
    base = bases.at(entry.home)
    return BaseModelAnswer(
        name=entry.name,
        state=follower.state_of(entry),
        origin=entry.origin,
        home=entry.home,
        base_revision=entry.base_revision or None,
        max_model_len=(base.max_model_len or None) if base else None,
        engines=len(base.engines.welcomes) if base else 0,
        requests_here=len(base.running) if base else 0,
        problem=entry.problem or None,
    )
