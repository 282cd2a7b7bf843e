"""The viewers of pages: dependencies that read the session's cookie."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from registry.errors import InvalidApiKey
from server.accounts import auth
from server.accounts.auth import Identity
from server.accounts.sessions import csrf_token
from server.api import errors
from server.api.deps import SESSION_COOKIE, SessionsDep, show_identity, show_operator

_HOMES = (
    (auth.USAGE_READ, "/console"),
    (auth.ADAPTERS_READ, "/console/adapters"),
    (auth.INFERENCE, "/console/playground"),
)


@dataclass(frozen=True, slots=True)
class Viewer:
    """The person who looks at a page.

    csrf: what requests of the page send in a header.   identity: None for the operator.
    """

    csrf: str
    identity: Identity | None = None

    @property
    def is_operator(self) -> bool:
        return self.identity is None

    def may(self, scope: str) -> bool:
        """Whether the viewer's key has a scope; the operator has none, as it is no tenant."""
        return self.identity is not None and self.identity.allows(scope)

    @property
    def home(self) -> str:
        """The first of the pages that the viewer may see."""
        if self.is_operator:
            return "/console/operator"
        return next((path for scope, path in _HOMES if self.may(scope)), "/console/keys")


class TenantViewer(Viewer):
    """A viewer with a tenant's key."""

    identity: Identity


class _Tenant:
    """A dependency that is the viewer, if it is a tenant whose key has the scope.

    Raises 401 without a session, and 403 without the scope.
    """

    def __init__(self, scope: str | None = None) -> None:
        self.scope = scope

    async def __call__(self, request: Request, sessions: SessionsDep) -> TenantViewer:
        token = _token(request)
        identity = show_identity(request, await sessions.identity_of(token))
        request.state.viewer = viewer = TenantViewer(csrf_token(token), identity)
        if self.scope is not None and not viewer.may(self.scope):
            raise errors.insufficient_permissions(self.scope)
        return viewer


async def _operator(request: Request, sessions: SessionsDep) -> Viewer:
    """The viewer, if it is the operator. Raises 401."""
    token = _token(request)
    if not await sessions.is_operators(token):
        raise InvalidApiKey()
    show_operator(request)
    request.state.viewer = viewer = Viewer(csrf_token(token))
    return viewer


def _token(request: Request) -> str:
    token = request.cookies.get(SESSION_COOKIE)
    if not token:
        raise errors.missing_api_key()
    return token


AnyTenant = Annotated[TenantViewer, Depends(_Tenant())]
UsageViewer = Annotated[TenantViewer, Depends(_Tenant(auth.USAGE_READ))]
AdaptersViewer = Annotated[TenantViewer, Depends(_Tenant(auth.ADAPTERS_READ))]
AdminViewer = Annotated[TenantViewer, Depends(_Tenant(auth.ADMIN))]
InferenceViewer = Annotated[TenantViewer, Depends(_Tenant(auth.INFERENCE))]
OperatorViewer = Annotated[Viewer, Depends(_operator)]
