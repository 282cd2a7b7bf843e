"""Faults on the console's routes become pages, and faults of ours leave a trace."""

import asyncio

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from registry.errors import Failed, Invalid
from server import logs
from server.console.page_route import PageRoute


def ask(fault: Exception) -> tuple[httpx.Response, dict[str, object]]:
    """Ask for a page that raises a fault. Returns the answer, and what the log's line has."""
    app, router = FastAPI(), APIRouter(route_class=PageRoute)

    @router.get("/console/page")
    async def page() -> None:
        raise fault

    app.include_router(router)

    async def get() -> tuple[httpx.Response, dict[str, object]]:
        notes = logs.begin_notes()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.get("/console/page"), notes

    return asyncio.run(get())


def test_a_fault_of_ours_is_a_page_that_says_nothing_and_a_trace_in_the_log() -> None:
    answer, notes = ask(Failed())
    assert answer.status_code == 500
    assert "This page cannot be shown" in answer.text
    assert "trace" in notes


def test_a_fault_of_the_viewer_is_a_page_that_says_it_and_no_trace() -> None:
    answer, notes = ask(Invalid("wings must be two.", param="wings"))
    assert answer.status_code == 400
    assert "wings must be two." in answer.text
    assert "trace" not in notes


def test_an_unforeseen_error_is_left_to_the_gateway() -> None:
    with pytest.raises(ZeroDivisionError):
        ask(ZeroDivisionError())
