"""The models a tenant may name: base models, its own adapters, and those shared with it."""

from typing import Literal

from fastapi import Request
from pydantic import Field
from sqlalchemy import Connection

from registry.catalog.adapter_rows import DELETED, find_adapter_row, find_version_row
from registry.catalog.names import model_not_found, parse_model
from registry.catalog.received_offers import list_accepted
from registry.errors import NotFound
from server.accounts import tenants
from server.accounts.auth import Identity
from server.adapters.names import resolve_adapter
from server.api.answer import Answer
from server.api.deps import BasesDep, CatalogDep, DatabaseDep, InferenceKey, tenants_router
from server.api.unknown_urls import unknown_url
from server.inference.bases import Bases
from server.inference.errors import engine_unavailable
from server.inference.route import Route
from server.inference.routes import visible_routes
from server.inference.served_base import ServedBase
from server.text.times import rfc3339

router = tenants_router()


class ModelAnswer(Answer):
    """A model that requests may name.

    created: in Unix seconds.   owned_by: the tenant's name.
    root, parent, max_model_len: vLLM's fields. The root is the name without version or alias, and
    the parent is the base model of an adapter.
    shutdown_date: OpenAI's field, the day (in UTC) on which a version was deleted; requests cannot
    name it.
    """

    id: str = Field(examples=["my-adapter@3"])
    object: Literal["model"] = "model"
    created: int = Field(examples=[1_798_761_600])
    owned_by: str = Field(examples=["acme"])
    root: str = Field(examples=["my-adapter"])
    parent: str | None = Field(examples=["base"])
    max_model_len: int | None = Field(examples=[32_768])
    shutdown_date: str | None = Field(examples=["2027-01-14"])


class ModelList(Answer):
    """All models that the key may name."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]


@router.get("/models")
async def list_models(
    database: DatabaseDep, catalog: CatalogDep, bases: BasesDep, identity: InferenceKey
) -> ModelList:
    """List the models that the key may name: base models, routes, own and shared adapters."""

    def read(conn: Connection) -> list[ModelAnswer]:
        named = visible_routes(conn, identity.tenant_id)
        # A base model that was served later than the route was made has the name.
        routes = [_route(it, identity) for name, it in named.items() if not bases.named(name)]
        own = [
            _model(adapter.name, adapter.created_at_ms, identity.tenant_name, base)
            for adapter in catalog.list_adapters(conn, identity.tenant_id)
            if adapter.latest and (base := bases.serving(adapter.latest.base))
        ]
        shared = list_accepted(conn, identity.tenant_id, bases.models.revisions)
        names = tenants.names_of(conn, {adapter.owner_id for adapter in shared})
        return (
            own
            + [
                _model(f"{owner}/{it.name}", it.created_at_ms, owner, base)
                for it in shared
                if it.base and (base := bases.serving(it.base))
                for owner in (names[it.owner_id],)
            ]
            + routes
        )

    adapters = await database.read(read)
    return ModelList(data=[*map(_base, bases.current), *adapters])


@router.get("/models/{model:path}")
async def get_model(
    request: Request,
    model: str,
    database: DatabaseDep,
    catalog: CatalogDep,
    bases: BasesDep,
    identity: InferenceKey,
) -> ModelAnswer:
    """Get one model by the name that requests use for it, or a version that was deleted."""
    if not model:
        raise unknown_url(request)
    if base := bases.named(model):
        return _base(base)

    def read(conn: Connection) -> ModelAnswer:
        if route := visible_routes(conn, identity.tenant_id).get(model):
            return _route(route, identity)
        try:
            named = resolve_adapter(conn, catalog, identity, model, request_key=model)
        except NotFound as fault:
            if fault.code != "model_not_found":
                raise
            return _withdrawn(conn, bases, identity, model)
        adapter = catalog.get_adapter(conn, named.owner_id, named.name)
        if (base := bases.serving(named.base)) is None:
            raise engine_unavailable()
        return _model(model, adapter.created_at_ms, named.owner_name, base)

    return await database.read(read)


def _base(base: ServedBase) -> ModelAnswer:
    answer = _model(base.model_id, base.model.created_at_s * 1000, "chorale", base)
    return answer.model_copy(update={"root": base.model_id, "parent": None})


def _withdrawn(conn: Connection, bases: Bases, identity: Identity, model: str) -> ModelAnswer:
    """The entry of a version of the tenant's own that was deleted. Raises NotFound."""
    asked, owner_id = parse_model(model), identity.tenant_id
    adapter = find_adapter_row(conn, owner_id, asked.name)
    version = adapter and find_version_row(conn, owner_id, adapter.adapter_id, asked.version or 0)
    base = version and version.state == DELETED and bases.serving(version.base)
    if not adapter or not version or not base:
        raise model_not_found(model)
    answer = _model(model, adapter.created_at_ms, identity.tenant_name, base)
    day = (rfc3339(version.deleted_at_ms) or "").partition("T")[0]
    return answer.model_copy(update={"shutdown_date": day})


def _route(route: Route, identity: Identity) -> ModelAnswer:
    """A route's entry. Its models may be of several lengths, so the entry says none."""
    return _model(
        route.name, route.created_at_ms, identity.tenant_name if route.owner else "chorale"
    )


def _model(
    model: str, created_at_ms: int, owner: str, base: ServedBase | None = None
) -> ModelAnswer:
    """An entry.   model: the name asked for, of an adapter with its version or alias.

    base: an adapter's; None for a route.
    """
    return ModelAnswer(
        id=model,
        created=created_at_ms // 1000,
        owned_by=owner,
        root=model.partition("@")[0],
        parent=base.model_id if base else None,
        max_model_len=(base.max_model_len or None) if base else None,
        shutdown_date=None,
    )
