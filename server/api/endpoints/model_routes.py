"""Routes: names for several models, of which one answers; tenants have some, the operator others.

In this module a route is what `server.inference.route` says, never a path of the API.
"""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from server.api.answer import Answer
from server.api.bodies import BodyFields, json_body
from server.api.deps import (
    AdaptersReadKey,
    AdaptersWriteKey,
    BasesDep,
    DatabaseDep,
    RoutesDep,
    operators_router,
    tenants_router,
)
from server.api.endpoints.lists import ListAnswer
from server.database.clock import now_ms
from server.database.database import Database
from server.inference import routes as kept
from server.inference.route import MAX_MODELS, Route, RouteModel, Strategy
from server.inference.routes import OPERATOR, Routes

router = tenants_router()
admin_router = operators_router()

# A header repeats the name, so it has no comma, semicolon or space.
_Model = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/:+-]*$")]


class _RouteModel(BodyFields):
    """A model of a route, with the option of the route's strategy.

    model: a base model or an adapter, by the name that requests use.
    first_token_timeout_s: only for fallback: seconds in which the first token has to come; null for
    the server's time.
    weight: only for weights: the model's share of the requests is its part of the sum of weights.
    min_mean_logprob: only for cascade: the least mean logprob of the tokens of an answer that is
    taken.
    """

    model: _Model
    first_token_timeout_s: Annotated[float | None, Field(gt=0, le=3600)] = None
    weight: Annotated[int | None, Field(ge=1, le=10_000)] = None
    min_mean_logprob: Annotated[float | None, Field(ge=-100, le=0)] = None


class _RouteBody(BodyFields):
    """A route.

    strategy: `fallback` takes the next model if one cannot answer, `weights` one model by chance,
    and `cascade` the next model if an answer is not likely enough.
    models: the models, in the order in which they are tried.
    """

    strategy: Strategy
    models: Annotated[list[_RouteModel], Field(min_length=1, max_length=MAX_MODELS)]


class RouteModelAnswer(Answer):
    """A model of a route. An option is null where its strategy has another, or none was given."""

    model: str = Field(examples=["small"])
    first_token_timeout_s: float | None = Field(examples=[5.0])
    weight: int | None = Field(examples=[None])
    min_mean_logprob: float | None = Field(examples=[None])


class RouteAnswer(Answer):
    """A route.   created_at, updated_at: Unix seconds."""

    id: str = Field(examples=["cheap"])
    object: Literal["route"] = "route"
    strategy: Strategy
    models: list[RouteModelAnswer]
    created_at: int = Field(examples=[1_798_761_600])
    updated_at: int = Field(examples=[1_798_761_600])


class RouteList(ListAnswer[RouteAnswer]):
    """All routes of an owner, in order of their names."""


class RouteDeleted(Answer):
    """The answer to the removal of a route."""

    id: str = Field(examples=["cheap"])
    object: Literal["route.deleted"] = "route.deleted"
    deleted: Literal[True] = True


@router.get("/routes")
async def list_routes(database: DatabaseDep, identity: AdaptersReadKey) -> RouteList:
    """List the tenant's own routes; `GET /v1/models` lists the operator's as well."""
    return await _list(database, identity.tenant_id)


@router.get("/routes/{route}")
async def get_route(route: str, database: DatabaseDep, identity: AdaptersReadKey) -> RouteAnswer:
    """Get one of the tenant's routes."""
    return await _get(database, identity.tenant_id, route)


@router.put("/routes/{route}")
async def set_route(
    route: str,
    database: DatabaseDep,
    routes: RoutesDep,
    bases: BasesDep,
    identity: AdaptersWriteKey,
    body: Annotated[_RouteBody, json_body(_RouteBody)],
) -> RouteAnswer:
    """Make a route, or change it; requests name it as `model`.

    It holds from the next request on, at the other gateways within two seconds.
    """
    made = _of_body(identity.tenant_id, route, body)
    return await _put(database, routes, made, bases.models.names, identity.actor)


@router.delete("/routes/{route}")
async def delete_route(
    route: str, database: DatabaseDep, routes: RoutesDep, identity: AdaptersWriteKey
) -> RouteDeleted:
    """Delete one of the tenant's routes."""
    return await _delete(database, routes, identity.tenant_id, route, identity.actor)


@admin_router.get("/routes")
async def list_operator_routes(database: DatabaseDep) -> RouteList:
    """List the operator's routes, which every tenant may name."""
    return await _list(database, OPERATOR)


@admin_router.get("/routes/{route}")
async def get_operator_route(route: str, database: DatabaseDep) -> RouteAnswer:
    """Get one of the operator's routes."""
    return await _get(database, OPERATOR, route)


@admin_router.put("/routes/{route}")
async def set_operator_route(
    route: str,
    body: Annotated[_RouteBody, json_body(_RouteBody)],
    database: DatabaseDep,
    routes: RoutesDep,
    bases: BasesDep,
) -> RouteAnswer:
    """Make a route that every tenant may name, or change it.

    A tenant's own route or adapter of the same name comes first.
    """
    made = _of_body(OPERATOR, route, body)
    return await _put(database, routes, made, bases.models.names, "operator")


@admin_router.delete("/routes/{route}")
async def delete_operator_route(
    route: str, database: DatabaseDep, routes: RoutesDep
) -> RouteDeleted:
    """Delete one of the operator's routes."""
    return await _delete(database, routes, OPERATOR, route, "operator")


async def _list(database: Database, owner: str) -> RouteList:
    found = await database.read(lambda conn: kept.list_routes(conn, owner))
    return RouteList(data=[_answer(route) for route in found])


async def _get(database: Database, owner: str, name: str) -> RouteAnswer:
    return _answer(await database.read(lambda conn: kept.get_route(conn, owner, name)))


async def _put(
    database: Database, routes: Routes, made: Route, base_ids: Collection[str], actor: str
) -> RouteAnswer:
    put = await database.write(
        lambda conn: kept.put_route(conn, made, base_ids=base_ids, actor=actor, now_ms=now_ms())
    )
    routes.forget()
    return _answer(put)


async def _delete(
    database: Database, routes: Routes, owner: str, name: str, actor: str
) -> RouteDeleted:
    await database.write(
        lambda conn: kept.remove_route(conn, owner, name, actor=actor, now_ms=now_ms())
    )
    routes.forget()
    return RouteDeleted(id=name)


def _of_body(owner: str, name: str, body: _RouteBody) -> Route:
    models = tuple(RouteModel(**model.model_dump()) for model in body.models)
    return Route(owner=owner, name=name, strategy=body.strategy, models=models)


def _answer(route: Route) -> RouteAnswer:
    models = [RouteModelAnswer.of_record(each) for each in route.models]
    return RouteAnswer.of_record(route, id=route.name, models=models)
