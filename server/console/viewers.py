"""The viewers of pages: dependencies that read the session's cookie."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from server.accounts import auth
from server.accounts.auth import Identity
from server.accounts.sessions import csrf_token
from server.api import errors
from server.api.deps import SESSION_COOKIE, SessionsDep, show_identity, show_operator


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
        if self.scope is not None and not identity.allows(self.scope):
            raise errors.insufficient_permissions(self.scope)
        return TenantViewer(csrf_token(token), identity)


async def _operator(request: Request, sessions: SessionsDep) -> Viewer:
    """The viewer, if it is the operator. Raises 401."""
    token = _token(request)
    if not await sessions.is_operators(token):
        raise errors.invalid_api_key()
    show_operator(request)
    return Viewer(csrf_token(token))


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
