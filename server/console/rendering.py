"""Renders pages from the templates, and serves the files that they load."""

import functools
import hashlib
from importlib.resources import files
from typing import Any

import jinja2
from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from registry.errors import NotFound
from server.billing.rating import format_usd
from server.console import formats
from server.console.days import quick_ranges
from server.console.viewers import Viewer
from server.database.clock import now_ms

router = APIRouter(prefix="/console", include_in_schema=False)

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    # With no-referrer a browser would not say from which origin a form is sent.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".md": "text/markdown"}
_FILES = files("server.console")


def render(template: str, viewer: Viewer | None, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a page.   viewer: who looks at it; None before signing in."""
    text = _templates().get_template(template).render(viewer=viewer, **values)
    return HTMLResponse(text, status, headers=_HEADERS)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(_FILES / "templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (formats.usd, formats.count, formats.size, formats.span, formats.when, formats.short)
    environment.filters |= {format.__name__: format for format in filters}
    environment.filters["exact"] = format_usd
    environment.globals["static"] = _static_url
    environment.globals["quick_ranges"] = lambda: quick_ranges(now_ms())
    return environment


@router.get("/static/{version}/{name}")
def static(version: str, name: str) -> Response:
    """Serve a style sheet or a script.   version: of all files, so that scripts import one another
    by name, and each is loaded once. Another version, as of a gateway of another release, is not
    kept by browsers.
    """
    if name not in _static_files():
        raise NotFound("There is no such file.", code="unknown_url")
    is_current = version == _static_version()
    kept = "public, max-age=31536000, immutable" if is_current else "no-store"
    media_type = _TYPES[name[name.rindex(".") :]]
    return Response(_static_files()[name], media_type=media_type, headers={"cache-control": kept})


@functools.cache
def _static_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (_FILES / "static").iterdir()}


@functools.cache
def _static_version() -> str:
    digest = hashlib.sha256()
    for name, content in sorted(_static_files().items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()[:12]


def _static_url(name: str) -> str:
    return f"/console/static/{_static_version()}/{name}"
