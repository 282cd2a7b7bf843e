"""Puts the console's pages into the application."""

from fastapi import FastAPI

from server.console import adapters, rendering, request_log, sign_in, spend

_PAGES = (rendering, sign_in, request_log, spend, adapters)


def mount(app: FastAPI) -> FastAPI:
    """Add the pages at `/console` to the gateway's application, and return it."""
    for module in _PAGES:
        app.include_router(module.router, prefix="/console", include_in_schema=False)
    return app
