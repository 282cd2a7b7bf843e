"""Routes: names for several models, of which one answers; tenants have some, the operator others.

In this module a route is what `server.inference.route` says, never a path of the API.
"""

from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field

from server.accounts.auth import ADAPTERS_READ, ADAPTERS_WRITE
from server.api.accounts import Account, AccountDep, AccountEndpoints
from server.api.answer import Answer, ListAnswer
from server.api.bodies import BodyFields, json_body
from server.api.deps import BasesDep, DatabaseDep, RoutesDep
from server.database.clock import now_ms
from server.inference import routes as kept
from server.inference.route import MAX_MODELS, Route, RouteModel, Strategy
from server.inference.routes import OPERATOR


async def _operators(request: Request) -> None:
    request.state.account = Account(OPERATOR)


both = AccountEndpoints(prefix="", account=_operators)

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


@both(
    "GET",
    "/routes",
    ADAPTERS_READ,
    name="list_operator_routes",
    description="List the operator's routes, which every tenant may name.",
)
async def list_routes(account: AccountDep, database: DatabaseDep) -> RouteList:
    """List the tenant's own routes; `GET /v1/models` lists the operator's as well."""
    found = await database.read(lambda conn: kept.list_routes(conn, account.tenant))
    return RouteList(data=[_answer(route) for route in found])


@both(
    "GET",
    "/routes/{route}",
    ADAPTERS_READ,
    name="get_operator_route",
    description="Get one of the operator's routes.",
)
async def get_route(route: str, account: AccountDep, database: DatabaseDep) -> RouteAnswer:
    """Get one of the tenant's routes."""
    return _answer(await database.read(lambda conn: kept.get_route(conn, account.tenant, route)))


@both(
    "PUT",
    "/routes/{route}",
    ADAPTERS_WRITE,
    name="set_operator_route",
    description="Make a route that every tenant may name, or change it.\n\n"
    "A tenant's own route or adapter of the same name comes first.",
)
async def set_route(
    route: str,
    account: AccountDep,
    database: DatabaseDep,
    routes: RoutesDep,
    bases: BasesDep,
    body: Annotated[_RouteBody, json_body(_RouteBody)],
) -> RouteAnswer:
    """Make a route, or change it; requests name it as `model`.

    It holds from the next request on, at the other gateways within two seconds.
    """
    models = tuple(RouteModel(**model.model_dump()) for model in body.models)
    made = Route(owner=account.tenant, name=route, strategy=body.strategy, models=models)
    names, actor = bases.models.names, account.actor
    put = await database.write(
        lambda conn: kept.put_route(conn, made, base_ids=names, actor=actor, now_ms=now_ms())
    )
    routes.forget()
    return _answer(put)


@both(
    "DELETE",
    "/routes/{route}",
    ADAPTERS_WRITE,
    name="delete_operator_route",
    description="Delete one of the operator's routes.",
)
async def delete_route(
    route: str, account: AccountDep, database: DatabaseDep, routes: RoutesDep
) -> RouteDeleted:
    """Delete one of the tenant's routes."""
    owner, actor = account.tenant, account.actor
    await database.write(
        lambda conn: kept.remove_route(conn, owner, route, actor=actor, now_ms=now_ms())
    )
    routes.forget()
    return RouteDeleted(id=route)


def _answer(route: Route) -> RouteAnswer:
    models = [RouteModelAnswer.of_record(each) for each in route.models]
    return RouteAnswer.of_record(route, id=route.name, models=models)
