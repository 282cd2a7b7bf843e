"""The pages of adapters: the list with uploads, one adapter, and what other tenants share."""

import functools
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from registry.catalog import grants
from registry.catalog.adapter_rows import LATEST, find_adapter_row, object_key
from registry.catalog.names import adapter_not_found, is_name
from registry.errors import NotFound
from server.accounts import auth
from server.accounts.auth import Identity
from server.api.adapter_view import VersionAnswer
from server.api.deps import AdapterViewDep, DatabaseDep, RegistryLimitsDep
from server.api.endpoints import adapters, offers, sharing
from server.api.endpoints.adapters import AdapterReader
from server.console.page_route import pages_router
from server.console.rendering import render
from server.console.viewers import AdaptersViewer
from server.inference.bases import Bases

router = pages_router()

_PAGE_SIZE = 50
_MOST_ROWS = 20
"""Rows of each table of one adapter's page, and deleted adapters that the list shows."""

Name = Annotated[str, Field(max_length=64)]
Number = Annotated[int | None, Field(ge=1, le=2**63 - 1)]
Place = tuple[str, str]
"""An engine, and the tier there."""


class ListQuery(BaseModel):
    """Conditions of the list.   search: a part of names.   after: last name of the page before."""

    model_config = ConfigDict(extra="forbid")

    search: Name = ""
    after: Name = ""


class AdapterQuery(BaseModel):
    """Parts of one adapter's page.

    version: the one whose passport is shown; None for `latest`.   alias: the one whose past is
    shown.   before, moved_before: last version and last move of the pages before.
    """

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int | None, Field(ge=1, le=999_999_999)] = None
    alias: Name = LATEST
    before: Number = None
    moved_before: Number = None

    def url(self, name: str, **changes: Any) -> str:
        """The URL of an adapter's page with some of this changed."""
        asked = self.model_dump(exclude_defaults=True) | changes
        return f"/console/adapters/{name}{f'?{urlencode(asked)}' if asked else ''}"


@router.get("/adapters")
async def list_adapters(
    viewer: AdaptersViewer,
    database: DatabaseDep,
    view: AdapterViewDep,
    limits: RegistryLimitsDep,
    query: Annotated[ListQuery, Query()],
) -> Response:
    """Show the adapters by name, and the form for uploads."""
    identity = viewer.identity
    reader = AdapterReader(database, view, identity)
    found = await adapters.list_adapters(reader, query.after or None, _PAGE_SIZE, query.search)
    ids = [adapter.adapter_id for adapter in found.data]

    def read(conn: Connection) -> dict[str, Any]:
        return {
            "num_grants": grants.count_grants(conn, identity.tenant_id, ids),
            "deleted": view.catalog.list_deleted(conn, identity.tenant_id, _MOST_ROWS),
        }

    latest = [adapter.latest for adapter in found.data if adapter.latest]
    return render(
        "adapters.html",
        viewer,
        adapters=found.data,
        next_url=_next_url(query, found.data[-1].id) if found.has_more else None,
        asked=query,
        places=_places(view.bases, identity, latest),
        may_write=viewer.may(auth.ADAPTERS_WRITE),
        base_names=view.bases.models.names,
        part_bytes=limits.part_bytes,
        **await database.read(read),
    )


@router.get("/adapters/{name}")
async def adapter(
    name: str,
    viewer: AdaptersViewer,
    database: DatabaseDep,
    view: AdapterViewDep,
    limits: RegistryLimitsDep,
    query: Annotated[AdapterQuery, Query()],
) -> Response:
    """Show one adapter, or how to restore it if it is deleted."""
    identity, may_write = viewer.identity, viewer.may(auth.ADAPTERS_WRITE)
    reader = AdapterReader(database, view, identity)
    versions = functools.partial(adapters.list_versions, name, reader, include_deleted=True)
    try:
        found = await adapters.get_adapter(name, reader)
    except NotFound:
        find = lambda conn: find_adapter_row(conn, identity.tenant_id, name)  # noqa: E731
        row = await database.read(find) if is_name(name) else None
        if row is None:
            raise
        return render("deleted_adapter.html", viewer, it=row, may_write=may_write)
    shown = found.latest
    if query.version:
        asked = (await versions(query.version + 1, 1)).data
        shown = next((it for it in asked if it.version == query.version), None)
        if shown is None:
            raise adapter_not_found(f"{name}@{query.version}")
    listed = await versions(query.before, _MOST_ROWS)
    moves = await adapters.list_moves(name, query.alias, reader, query.moved_before, _MOST_ROWS)
    return render(
        "adapter.html",
        viewer,
        it=found,
        shown=shown,
        versions=listed,
        moves=moves,
        grants=(await sharing.list_grants(name, reader)).data,
        asked=query,
        places=_places(view.bases, identity, listed.data),
        may_write=may_write,
        base_names=view.bases.models.names,
        part_bytes=limits.part_bytes,
    )


@router.get("/offers")
async def list_offers(
    viewer: AdaptersViewer, database: DatabaseDep, view: AdapterViewDep
) -> Response:
    """Show the adapters that other tenants offer or share."""
    found = await offers.list_offers(AdapterReader(database, view, viewer.identity))
    return render("offers.html", viewer, offers=found, may_write=viewer.may(auth.ADAPTERS_WRITE))


def _next_url(query: ListQuery, last: str) -> str:
    return f"/console/adapters?{urlencode({'search': query.search, 'after': last})}"


def _places(
    bases: Bases, identity: Identity, versions: Iterable[VersionAnswer]
) -> dict[str, list[Place]]:
    """The engines that have a version's weights or are getting them, by the version's digest."""
    found: dict[str, list[Place]] = {}
    for version in versions:
        base = bases.named(version.base_model or "")
        if base is None:
            continue
        key = object_key(identity.tenant_id, version.digest)
        told = [(engine.name, engine.residency.get(key)) for engine in base.engines]
        found[version.digest] = sorted(
            (name, it.tier) for name, it in told if it and it.tier != "remote"
        )
    return found
