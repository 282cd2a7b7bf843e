"""Liveness, readiness, metrics and the API's document, for machines; one static page, for people.

These endpoints take no key. Only the metrics tell of tenants; they are for some addresses alone.
"""

import asyncio
from importlib.resources import files
from typing import Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import Field

from server.api.answer import Answer
from server.api.deps import (
    BasesDep,
    DrainDep,
    LedgerProbeDep,
    MetricsDep,
    NeighboursDep,
    require_scraper,
)
from server.logs import note
from server.version import VERSION, build

# Of the code that this process runs, whatever becomes of the files.
_BUILD = build()

router = APIRouter(include_in_schema=False)

_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class HealthAnswer(Answer):
    """A process that answers."""

    status: Literal["ok"] = "ok"


class GatewayVersion(Answer):
    """The release of a gateway.   build: a digest of its code, by which builds differ."""

    version: str = Field(examples=["1.0.0"])
    build: str = Field(examples=["1498082f9dc4"])


class Readiness(Answer):
    """A gateway's readiness, and that of its parts."""

    status: Literal["ready", "not ready"]
    engine: bool
    ledger: bool
    serving: bool


@router.get("/")
def page() -> HTMLResponse:
    """Show the page that asks several models at once."""
    html = files("server.api").joinpath("static/index.html").read_text()
    return HTMLResponse(html, headers=_PAGE_HEADERS)


@router.get("/look.css")
def look() -> Response:
    """Get the style that the page and the console have in common."""
    return _shared("look.css", "text/css")


@router.get("/stream.js")
def stream() -> Response:
    """Get the script that the page and the console have in common."""
    return _shared("stream.js", "text/javascript")


def _shared(name: str, media_type: str) -> Response:
    content = files("server.api").joinpath("static", name).read_bytes()
    return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})


# The document takes 0.4 s to make, on a thread: streams go on meanwhile.
@router.get("/openapi.json")
def openapi(request: Request) -> JSONResponse:
    """Get the OpenAPI document of this API."""
    return JSONResponse(request.app.openapi())


@router.get("/health")
def health() -> HealthAnswer:
    """Check that the process answers."""
    return HealthAnswer()


@router.get("/version")
def version() -> GatewayVersion:
    """Get the release and the build of this gateway."""
    return GatewayVersion(version=VERSION, build=_BUILD)


@router.get("/ready")
async def ready(
    bases: BasesDep, drain: DrainDep, ledger_probe: LedgerProbeDep, response: Response
) -> Readiness:
    """Check whether this gateway can serve; the status is 503 if it cannot.

    It can serve while an engine is ready or would wake for a request, the ledger can be written,
    and the process is not about to end.
    """
    ledger = await ledger_probe.is_writable()
    parts = {
        "engine": bases.is_ready,
        "ledger": ledger,
        "serving": not drain.has_begun,
    }
    if missing := [name for name, is_well in parts.items() if not is_well]:
        response.status_code = 503
        note(missing=", ".join(missing))
    return Readiness(status="ready" if all(parts.values()) else "not ready", **parts)


@router.get("/metrics", dependencies=[Depends(require_scraper)])
async def metrics(metrics: MetricsDep, neighbours: NeighboursDep) -> Response:
    """Get the metrics for Prometheus, those of all gateways of this machine."""
    if neighbours is None:
        text = await asyncio.to_thread(metrics.render)
    else:
        text = await neighbours.render()
    return Response(text, media_type="text/plain; version=0.0.4")
