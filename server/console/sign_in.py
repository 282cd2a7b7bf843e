"""Signing in, which is pasting a key once, and signing out."""

import math
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from registry.errors import Forbidden, InvalidApiKey, Limited
from server.accounts.sessions import LIFETIME_S, Sessions
from server.api.bodies import read_body
from server.api.deps import SESSION_COOKIE, BodiesDep, SessionsDep
from server.console.page_route import OPERATORS, SIGN_IN, pages_router
from server.console.rendering import render

router = pages_router()

_MAX_FORM_BYTES = 4096
_STRANGER = "nobody yet"
"""Stands for a tenant's id where bodies of forms are counted before anybody is signed in."""

Onward = Annotated[str, Query(alias="next", max_length=2048)]


@router.get("/sign-in")
async def show(onward: Onward = "") -> Response:
    """Show the page for signing in.   onward: the path to go to afterwards."""
    return render("sign_in.html", None, next=onward, message=None)


@router.post("/sign-in")
async def sign_in(
    request: Request, sessions: SessionsDep, bodies: BodiesDep, onward: Onward = ""
) -> Response:
    """Begin a session of the key in the form, in a cookie, and go on."""
    origin = _origin_of_ours(request)
    request.state.tenant_id = _STRANGER
    form = parse_qs((await read_body(request, bodies, _MAX_FORM_BYTES)).decode("utf-8", "replace"))
    key = form.get("key", [""])[0].strip()
    try:
        token = await sessions.begin(key)
        destination = await _destination(sessions, token, onward)
    except (InvalidApiKey, Forbidden) as error:
        return render("sign_in.html", None, 401, next=onward, message=str(error))
    except Limited as error:
        page = render("sign_in.html", None, 429, next=onward, message=str(error))
        page.headers["retry-after"] = str(math.ceil(error.retry_after_s or 0))
        return page
    answer = RedirectResponse(destination, 303)
    answer.set_cookie(
        SESSION_COOKIE,
        token,
        max_age=LIFETIME_S,
        httponly=True,
        samesite="strict",
        secure=origin.startswith("https:"),
    )
    return answer


@router.post("/sign-out")
async def sign_out(request: Request, sessions: SessionsDep) -> Response:
    """End the session, and forget its cookie."""
    _origin_of_ours(request)
    if token := request.cookies.get(SESSION_COOKIE):
        await sessions.end(token)
    answer = RedirectResponse(SIGN_IN, 303)
    answer.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
    return answer


def _origin_of_ours(request: Request) -> str:
    """The origin of the page that sent a form. Raises Invalid if that is not this server's.

    The browser says it, and a page of another site cannot change it; it also tells whether the
    browser came by https, which a proxy may end.
    """
    origin = request.headers.get("origin", "")
    if origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden("Send this form from the console's own page.")
    return origin


async def _destination(sessions: Sessions, token: str, onward: str) -> str:
    """The path to go to after signing in: onward, if it is a page for this kind of viewer."""
    if await sessions.is_operators(token):
        return onward if onward.startswith(OPERATORS) else OPERATORS
    is_tenants = onward.startswith("/console") and not onward.startswith(OPERATORS)
    return onward if is_tenants and "\\" not in onward else "/console"
