"""The page of prices: the versions of all scopes or of one, and the form that adds one."""

from typing import Annotated

from fastapi import Query, Response

from server.api.deps import BasesDep, DatabaseDep
from server.api.endpoints.prices import list_prices
from server.billing.prices import SCOPES, Scope
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import OperatorViewer
from server.database.clock import now_ms

router = pages_router("/operator/prices")

_MOST_ROWS = 200


@router.get("")
async def show(
    viewer: OperatorViewer,
    database: DatabaseDep,
    bases: BasesDep,
    scope: Scope | None = None,
    scope_id: Annotated[str | None, Query(max_length=64, pattern=r"^[!-~]*$")] = None,
) -> Response:
    """Show prices, the latest start first, each with whether it is in effect."""
    states, begun, now_s = [], set(), now_ms() // 1000
    for price in (await list_prices(database, scope, scope_id)).data:
        what, state = (price.scope, price.scope_id, price.base_model), "to come"
        if price.effective_at <= now_s:
            is_past = what in begun or (price.until or now_s + 1) <= now_s
            state = "past" if is_past else "in effect"
            begun.add(what)
        states.append((price, state))
    return render(
        "operator_prices.html",
        viewer,
        scope=scope,
        scope_id=scope_id,
        scopes=SCOPES,
        prices=states[:_MOST_ROWS],
        is_cut=len(states) > _MOST_ROWS,
        bases=bases.models.names,
    )
