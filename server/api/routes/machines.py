"""Liveness, readiness and metrics, for machines, and one static page, for people.

These endpoints take no key, and say nothing about any tenant.
"""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response

from server.api.deps import DrainDep, EnginesDep, LedgerProbeDep, MetricsDep
from server.version import VERSION

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


@router.get("/")
def page() -> HTMLResponse:
    """Show the page that asks several models at once."""
    html = files("server.api").joinpath("static/index.html").read_text()
    return HTMLResponse(html, headers=_PAGE_HEADERS)


@router.get("/health")
def health() -> dict[str, str]:
    """Check that the process answers."""
    return {"status": "ok"}


@router.get("/version")
def version() -> dict[str, str]:
    """Get the release of this gateway."""
    return {"version": VERSION}


@router.get("/ready")
async def ready(engines: EnginesDep, drain: DrainDep, ledger_probe: LedgerProbeDep) -> JSONResponse:
    """Check whether this gateway can serve; the status is 503 if it cannot.

    It can serve while an engine is ready, the ledger can be written, and the process is not about
    to end.
    """
    ledger = await ledger_probe.is_writable()
    parts = {
        "engine": engines.is_ready,
        "ledger": ledger,
        "serving": not drain.has_begun,
    }
    body = {"status": "ready" if all(parts.values()) else "not ready", **parts}
    return JSONResponse(body, 200 if all(parts.values()) else 503)


@router.get("/metrics")
def metrics(metrics: MetricsDep) -> Response:
    """Get the metrics for Prometheus."""
    return Response(metrics.render(), media_type="text/plain; version=0.0.4")
