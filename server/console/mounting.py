"""Puts the console's pages into the application."""

from fastapi import FastAPI

from registry.errors import NotFound
from server.console import (
    adapters,
    bill,
    keys,
    playground,
    rendering,
    request_log,
    sign_in,
    spend,
    webhooks,
)
from server.console.operator import audit_log, engines, incidents, prices, slow_requests, tenants
from server.console.page_route import pages_router

_nowhere = pages_router()

_PAGES = (
    rendering,
    sign_in,
    request_log,
    spend,
    playground,
    keys,
    bill,
    webhooks,
    adapters,
)
_OPERATORS_PAGES = (engines, tenants, prices, slow_requests, incidents, audit_log)


def mount(app: FastAPI) -> FastAPI:
    """Add the pages at `/console` to the gateway's application, and return it."""
    for router in (*(module.router for module in (*_PAGES, *_OPERATORS_PAGES)), _nowhere):
        app.router.routes += router.routes  # as in server.api.app
    return app


@_nowhere.get("/{path:path}")
def nowhere(path: str) -> None:
    """Say that there is no such page."""
    raise NotFound(f"The console has no page {path[:64]!r}.", code="unknown_url")
