"""The pages of keys and limits: all keys with what is used of the limits now, and one key."""

from typing import Annotated, Literal

from fastapi import Query, Response
from sqlalchemy import Connection

from server.accounts import auth
from server.accounts.keys import MAX_NAME, get_key, list_keys
from server.accounts.lineage import ApiKey
from server.api.deps import BasesDep, DatabaseDep, LimiterDep
from server.api.endpoints.limits import get_limits
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import AdminViewer, AnyTenant
from server.database.clock import now_ms

router = pages_router("/keys")

_PAGE_SIZE = 50

State = Literal["valid", "revoked", "expired"]


@router.get("")
async def show_keys(
    viewer: AnyTenant,
    database: DatabaseDep,
    limiter: LimiterDep,
    bases: BasesDep,
    after: Annotated[str, Query(max_length=32)] = "",
) -> Response:
    """Show the keys, or the viewer's alone if it has not got the scope admin, and the limits.

    after: the id of the last key of the page before.
    """
    identity = viewer.identity

    def read(conn: Connection) -> list[ApiKey]:
        if not viewer.may(auth.ADMIN):
            return [get_key(conn, identity.tenant_id, identity.key_id)]
        return list_keys(
            conn, identity.tenant_id, after=after or None, limit=_PAGE_SIZE + 1, newest_first=True
        )

    found = await database.read(read)
    keys = found[:_PAGE_SIZE]
    return render(
        "keys.html",
        viewer,
        keys=[(key, state_of(key)) for key in keys],
        next_url=f"/console/keys?after={keys[-1].key_id}" if len(found) > _PAGE_SIZE else None,
        now=await get_limits(database, limiter, bases, identity),
        scopes=sorted(identity.scopes),
        max_name=MAX_NAME,
    )


@router.get("/{key_id}")
async def show_key(key_id: str, viewer: AdminViewer, database: DatabaseDep) -> Response:
    """Show one key, with all that may be done to it."""
    tenant_id = viewer.identity.tenant_id
    key = await database.read(lambda conn: get_key(conn, tenant_id, key_id))
    scopes = sorted(viewer.identity.scopes | key.scopes)
    return render("key.html", viewer, it=key, state=state_of(key), scopes=scopes, max_name=MAX_NAME)


def state_of(key: ApiKey) -> State:
    if key.revoked_at_ms is not None:
        return "revoked"
    return "valid" if key.is_live(now_ms()) else "expired"
