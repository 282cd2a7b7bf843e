"""The class of the console's routes: a fault becomes a page that says what to do."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute

from server.api.errors import KNOWN, ErrorAnswer, answer_of
from server.console.rendering import render

SIGN_IN = "/console/sign-in"
OPERATORS = "/console/operator"


class PageRoute(APIRoute):
    """Shows a fault as a page, and leads a viewer without a session to the page for signing in."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_faults(request: Request) -> Response:
            try:
                answer: Response = await handle(request)
            except KNOWN as error:
                answer = _fault(request, answer_of(error))
            return answer

        return handle_faults


def pages_router(prefix: str = "") -> APIRouter:
    return APIRouter(prefix=f"/console{prefix}", route_class=PageRoute, include_in_schema=False)


def _fault(request: Request, answer: ErrorAnswer) -> Response:
    if answer.status != 401:
        viewer = getattr(request.state, "viewer", None)
        asked = request.query_params if answer.error["param"] in ("start", "end") else {}
        # The operator's session opens no page of tenants.
        home = OPERATORS if request.scope["path"].startswith(OPERATORS) else "/console"
        return render("fault.html", viewer, answer.status, answer=answer, home=home, asked=asked)
    target = f"{SIGN_IN}?next={quote(_path(request))}"
    if "hx-request" in request.headers:
        # A part of a page must not be replaced by the page for signing in.
        return Response(status_code=401, headers={"hx-redirect": target})
    return RedirectResponse(target, 303)


def _path(request: Request) -> str:
    query = request.scope["query_string"].decode("latin-1")
    path: str = request.scope["path"]
    return f"{path}?{query}" if query else path
