"""Routes as they are kept: rows of an owner, and a cache by which requests find them."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from registry.catalog.adapter_rows import lock_tenant
from registry.catalog.audit import record_audit
from registry.catalog.names import check_name, is_name
from registry.errors import Conflict, Invalid, NotFound, QuotaExceeded
from registry.tables import adapters
from registry.uploads.rules import unfinished_uploads
from server.database.database import Database
from server.database.expiring_cache import ExpiringCache
from server.inference.route import Route, RouteModel, check_models
from server.inference.tables import routes

OPERATOR = ""
"""The owner of the operator's routes, which every tenant may name."""
MAX_ROUTES = 64
"""Routes that an owner may have."""


class Routes:
    """The routes that each tenant may name, so that requests need no query.

    A change is seen at once in this gateway, and within two seconds in the others. monotonic:
    returns seconds.
    """

    def __init__(
        self, database: Database, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._cache: ExpiringCache[Mapping[str, Route]] = ExpiringCache(monotonic=monotonic)

    async def find(self, tenant_id: str, model: str) -> Route | None:
        """The route that the tenant means by `model`, or None. Raises LedgerUnavailable."""
        if not is_name(model):
            return None
        found = await self._cache.get(tenant_id, lambda: self._read(tenant_id))
        return found.get(model)

    def forget(self) -> None:
        """Empty the cache; call it after a change of a route."""
        self._cache.forget()

    async def _read(self, tenant_id: str) -> Mapping[str, Route]:
        return await self._database.read(lambda conn: visible_routes(conn, tenant_id))


def visible_routes(conn: Connection, tenant_id: str) -> dict[str, Route]:
    """The routes that a tenant may name: its own, and those of the operator's whose names are
    neither its own routes' nor its adapters'.
    """
    by_name = {route.name: route for route in list_routes(conn, OPERATOR)}
    if by_name and tenant_id != OPERATOR:
        mine = sa.select(adapters.c.name).where(
            adapters.c.tenant_id == tenant_id,
            adapters.c.name.in_(by_name),
            adapters.c.deleted_at_ms.is_(None),
        )
        for name in conn.scalars(mine):
            del by_name[name]
    return by_name | {route.name: route for route in list_routes(conn, tenant_id)}


def list_routes(conn: Connection, owner: str) -> list[Route]:
    """The owner's routes in order of their names."""
    query = sa.select(routes).where(routes.c.owner == owner).order_by(routes.c.name)
    return [_route(row) for row in conn.execute(query)]


def get_route(conn: Connection, owner: str, name: str) -> Route:
    """One of the owner's routes. Raises NotFound."""
    query = sa.select(routes).where(routes.c.owner == owner, routes.c.name == name)
    row = conn.execute(query).first() if is_name(name) else None
    if row is None:
        raise NotFound("There is no such route.", code="route_not_found", param="route")
    return _route(row)


def put_route(
    conn: Connection, route: Route, *, base_ids: Collection[str], actor: str, now_ms: int
) -> Route:
    """Make the route, or change the one of its name. Raises Invalid, Conflict,
    QuotaExceeded.

    base_ids: the names of base models, which no route may have.
    """
    check_name(route.name, param="route")
    check_models(route.strategy, route.models)
    lock_tenant(conn, route.owner)
    if route.name in base_ids or _is_adapter(conn, route.owner, route.name, now_ms):
        raise _name_in_use(route.name, "a base model or an adapter")
    _check_names(conn, route)
    existing = {known.name: known for known in list_routes(conn, route.owner)}
    if route.name not in existing and len(existing) >= MAX_ROUTES:
        message = f"There are {MAX_ROUTES} routes, the most there may be; delete one first."
        raise QuotaExceeded(message, code="max_routes")
    known = existing.get(route.name)
    route = replace(
        route, created_at_ms=known.created_at_ms if known else now_ms, updated_at_ms=now_ms
    )
    values = {
        "owner": route.owner,
        "name": route.name,
        "strategy": route.strategy,
        "models": msgspec.json.encode(route.models).decode(),
        "created_at_ms": route.created_at_ms,
        "updated_at_ms": now_ms,
    }
    if known:
        conn.execute(sa.update(routes).where(*_is(route.owner, route.name)).values(values))
    else:
        conn.execute(sa.insert(routes).values(values))
    detail = f"{route.strategy}: {', '.join(model.model for model in route.models)}"
    _record(conn, "route.set", route.owner, route.name, actor, now_ms, detail)
    return route


def remove_route(conn: Connection, owner: str, name: str, *, actor: str, now_ms: int) -> None:
    """Delete one of the owner's routes. Raises NotFound."""
    lock_tenant(conn, owner)
    get_route(conn, owner, name)
    conn.execute(sa.delete(routes).where(*_is(owner, name)))
    _record(conn, "route.remove", owner, name, actor, now_ms)


def refuse_name_of_route(conn: Connection, tenant_id: str, name: str) -> None:
    """Raise Conflict if the tenant has a route of this name, which its adapter cannot have then.

    The tenant's names are locked until the transaction ends.
    """
    lock_tenant(conn, tenant_id)
    if conn.scalar(sa.select(routes.c.name).where(*_is(tenant_id, name))) is not None:
        raise _name_in_use(name, "a route")


def _is(owner: str, name: str) -> tuple[sa.ColumnElement[bool], ...]:
    return routes.c.owner == owner, routes.c.name == name


def _is_adapter(conn: Connection, owner: str, name: str, now_ms: int) -> bool:
    """Whether the owner has an adapter of this name, or uploads one."""
    query = sa.select(adapters.c.adapter_id).where(
        adapters.c.tenant_id == owner, adapters.c.name == name, adapters.c.deleted_at_ms.is_(None)
    )
    coming = unfinished_uploads(conn, owner, now_ms)
    is_coming = any(upload.adapter_name == name and not upload.is_dry_run for upload in coming)
    return is_coming or conn.scalar(query) is not None


def _check_names(conn: Connection, route: Route) -> None:
    """Raise Invalid if a model of the route is a route."""
    names = visible_routes(conn, route.owner).keys() | {route.name}
    for place, model in enumerate(route.models):
        if model.model in names:
            path = f"models.{place}.model"
            message = f"{path}: {model.model} is a route; name base models or adapters."
            raise Invalid(message, param=path)


def _name_in_use(name: str, kind: str) -> Conflict:
    message = f"{name} is the name of {kind}; choose another."
    return Conflict(message, code="name_in_use", param="name")


def _record(
    conn: Connection, action: str, owner: str, name: str, actor: str, now_ms: int, detail: str = ""
) -> None:
    record_audit(conn, owner or None, action, detail, target=name, at_ms=now_ms, actor=actor)


def _route(row: Row[Any]) -> Route:
    return Route(
        owner=row.owner,
        name=row.name,
        strategy=row.strategy,
        models=msgspec.json.decode(row.models, type=tuple[RouteModel, ...]),
        created_at_ms=row.created_at_ms,
        updated_at_ms=row.updated_at_ms,
    )
