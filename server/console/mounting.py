"""Puts the console's pages into the application."""

from fastapi import FastAPI

from server.console import rendering, request_log, sign_in, spend
from server.console.operator import audit_log, engines, incidents, slow_requests, tenants

_PAGES = (rendering, sign_in, request_log, spend)
_OPERATORS_PAGES = (engines, tenants, slow_requests, incidents, audit_log)


def mount(app: FastAPI) -> FastAPI:
    """Add the pages at `/console` to the gateway's application, and return it."""
    for module in (*_PAGES, *_OPERATORS_PAGES):
        app.include_router(module.router, prefix="/console", include_in_schema=False)
    return app
