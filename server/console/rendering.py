"""Renders pages from the templates, and serves the files that they load."""

import functools
import hashlib
import re
from importlib.resources import files
from typing import Any

import jinja2
from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from server.api import errors
from server.console import formats
from server.console.viewers import Viewer

router = APIRouter()

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
_IMPORT = re.compile(rb'(from "\./)([a-z_]+\.js)(?=")')


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
    environment.globals["static"] = _static_url
    return environment


@router.get("/static/{name}")
def static(name: str) -> Response:
    """Serve a style sheet or a script; its URL changes with its content."""
    if name not in _static_names():
        raise errors.not_found("There is no such file.", code="unknown_url")
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    media_type = _TYPES[name[name.rindex(".") :]]
    return Response(_static_file(name), media_type=media_type, headers=headers)


@functools.cache
def _static_names() -> frozenset[str]:
    return frozenset(path.name for path in (_FILES / "static").iterdir())


@functools.cache
def _static_file(name: str) -> bytes:
    """A file as it is served.

    Scripts import one another by the URLs that pages have for them: by another URL a browser would
    run the script a second time, and keep an old one after an upgrade.
    """
    content = (_FILES / "static" / name).read_bytes()
    if not name.endswith(".js"):
        return content
    return _IMPORT.sub(lambda found: found[1] + _versioned(found[2].decode()).encode(), content)


@functools.cache
def _versioned(name: str) -> str:
    return f"{name}?{hashlib.sha256(_static_file(name)).hexdigest()[:12]}"


def _static_url(name: str) -> str:
    return f"/console/static/{_versioned(name)}"
