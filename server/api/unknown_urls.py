"""Errors for URLs without an endpoint, which say where the request belongs, if that is known."""

import re

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Match

from registry.errors import Fault, Invalid, NotFound

_NOT_SERVED = re.compile(
    "(?:/v[12])?/(?:assistants|audio|batches|chatkit|classify|containers|conversations|edits|"
    "embeddings|engines|evals|files|fine_tuning|images|messages|moderations|organization|pooling|"
    "projects|realtime|rerank|responses|score|skills|threads|uploads|vector_stores|videos)(?![^/])"
)
"""Beginning of the paths that OpenAI, Anthropic, Cohere or vLLM serves and Chorale does not."""
_BASE_URL = "The base URL of OpenAI's clients ends in /v1, once and without a slash."


def unknown_url(request: Request) -> Fault:
    """The error for a request that no endpoint takes, by its path.

    A known endpoint of other servers is a 400, which LiteLLM's proxy never counts: after one 404,
    and after several 5xx, it takes a deployment away from all its users.
    """
    path = re.sub("/+", "/", request.scope["path"]).rstrip("/")
    for meant in (path, re.sub("^(/v1)*", "/v1", path)):
        if template := _template(request, meant):
            return NotFound(
                f"There is no such endpoint. Send this request to {template}. {_BASE_URL}",
                code="unknown_url",
            )
    if known := _NOT_SERVED.match(path):
        return Invalid(
            f"Chorale does not serve {known[0]}. Chats go to POST /v1/chat/completions; "
            "GET /openapi.json lists all endpoints.",
            code="endpoint_not_served",
        )
    message = "There is no such endpoint; GET /openapi.json lists them all."
    return NotFound(message, code="unknown_url")


def _template(request: Request, path: str) -> str | None:
    """The path, as it is declared, of the endpoint that would take the request at `path`."""
    scope = {**request.scope, "path": path}
    for route in request.app.router.routes:
        if isinstance(route, APIRoute) and route.matches(scope)[0] is Match.FULL:
            return route.path_format
    return None
