"""Pages of other origins: which of them may call the gateway from a browser."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server import logs
from server.api import errors

_METHODS = ["GET", "PUT", "POST", "PATCH", "DELETE"]
_MAX_ORIGIN_CHARACTERS = 128


class CrossOrigin(CORSMiddleware):
    """Lets pages of the origins that are set call, without cookies, and read every header.

    Other pages are told to ask the operator, in the answer to the question that a browser asks
    before a call (a preflight). The request's line of the log has their origin.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app, origins, allow_methods=_METHODS, allow_headers=["*"], expose_headers=["*"]
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        origin = request_headers["origin"]
        if self.is_allowed_origin(origin):
            return super().preflight_response(request_headers)
        shown = ascii(origin[:_MAX_ORIGIN_CHARACTERS])
        logs.note(refused_origin=shown)
        error = errors.origin_not_allowed(shown)
        return JSONResponse(errors.error_body(error), error.status)

    async def simple_response(
        self, scope: Scope, receive: Receive, send: Send, request_headers: Headers
    ) -> None:
        if self.allow_origins:
            await super().simple_response(scope, receive, send, request_headers)
        else:
            await self.app(scope, receive, send)
