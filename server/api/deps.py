"""What endpoints ask for: the gateway, and who calls.

Authentication is a dependency of every router; nothing here looks at a path.
"""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from server.accounts import auth
from server.accounts.auth import Identity
from server.api import errors, logs
from server.database.clock import now_ms
from server.gateway import Gateway

_bearer = HTTPBearer(auto_error=False)
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


async def get_gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


GatewayDep = Annotated[Gateway, Depends(get_gateway)]


async def authenticate(gateway: GatewayDep, bearer: Bearer) -> Identity:
    """The tenant and key of a request. Raises 401, and 403 for a suspended tenant."""
    if bearer is None:
        raise errors.missing_api_key()
    identity = await gateway.identities.of(bearer.credentials)
    gateway.key_uses[identity.key_id] = now_ms()
    logs.note(tenant_id=identity.tenant_id, key_id=identity.key_id)
    return identity


IdentityDep = Annotated[Identity, Depends(authenticate)]


class _Scoped:
    """An identity whose key has one scope. Raises 403."""

    def __init__(self, scope: str) -> None:
        self.scope = scope

    async def __call__(self, identity: IdentityDep) -> Identity:
        if not identity.allows(self.scope):
            raise errors.insufficient_permissions(self.scope)
        return identity


InferenceKey = Annotated[Identity, Depends(_Scoped(auth.INFERENCE))]
AdaptersReadKey = Annotated[Identity, Depends(_Scoped(auth.ADAPTERS_READ))]
AdaptersWriteKey = Annotated[Identity, Depends(_Scoped(auth.ADAPTERS_WRITE))]
UsageKey = Annotated[Identity, Depends(_Scoped(auth.USAGE_READ))]
TenantAdminKey = Annotated[Identity, Depends(_Scoped(auth.ADMIN))]


async def require_admin(gateway: GatewayDep, bearer: Bearer) -> None:
    """Only the operator's admin key."""
    if bearer is None:
        raise errors.missing_api_key()
    if not gateway.admin_key.is_it(bearer.credentials):
        raise errors.invalid_api_key()


async def usage_reader(gateway: GatewayDep, bearer: Bearer) -> str | None:
    """The tenant whose usage a key reads; None, which is every tenant's, for the admin key."""
    if bearer is not None and gateway.admin_key.is_it(bearer.credentials):
        return None
    identity = await authenticate(gateway, bearer)
    return (await _Scoped(auth.USAGE_READ)(identity)).tenant_id


UsageReader = Annotated[str | None, Depends(usage_reader)]
