"""Endpoints about one tenant, which its own keys and the operator call at paths of their own."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection

from server.accounts import tenants
from server.accounts.auth import Identity
from server.api.deps import (
    DatabaseDep,
    IdentitiesDep,
    Scoped,
    operators_router,
    tenants_router,
)

T = TypeVar("T")
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Account:
    """The tenant that a request is about.

    tenant: its id or its name.   by: the identity of its key that asks; None for the operator.
    """

    tenant: str
    by: Identity | None = None

    @property
    def actor(self) -> str:
        """The name of who asks, for the audit log."""
        return self.by.actor if self.by else "operator"

    def tenant_id(self, conn: Connection) -> str:
        """The tenant's id. Raises NotFound."""
        return self.by.tenant_id if self.by else tenants.get_tenant(conn, self.tenant).tenant_id


async def _account_of(request: Request) -> Account:
    account: Account = request.state.account
    return account


AccountDep = Annotated[Account, Depends(_account_of)]


@dataclass(frozen=True, slots=True)
class AccountRows:
    """The rows of the account that a request is about, as functions of its tenant's id."""

    account: AccountDep
    database: DatabaseDep
    identities: IdentitiesDep

    async def read(self, read: Callable[[Connection, str], T]) -> T:
        """The result of `read`. Raises NotFound."""
        return await self.database.read(lambda conn: read(conn, self.account.tenant_id(conn)))

    async def write(self, change: Callable[[Connection, str], T]) -> T:
        """Make a change that this gateway's next request sees. Raises NotFound."""
        by = self.account.by
        tenant_id = by.tenant_id if by else await self.read(lambda _, tenant_id: tenant_id)
        try:
            return await self.database.write(lambda conn: change(conn, tenant_id))
        finally:
            self.identities.forget(tenant_id)


RowsDep = Annotated[AccountRows, Depends()]


async def _named(request: Request, tenant: str) -> None:
    request.state.account = Account(tenant)


class AccountEndpoints:
    """Two routers, for tenants and for the operator, of endpoints that take a tenant's account.

    prefix, account: the path at which the operator finds an account, and a dependency that notes
    it as the request's; by default it is the tenant that the path names.
    """

    def __init__(
        self, prefix: str = "/tenants/{tenant}", account: Callable[..., Any] = _named
    ) -> None:
        self.router, self.admin_router = tenants_router(), operators_router()
        self._prefix = prefix
        self._account = account

    def __call__(
        self,
        method: str,
        path: str,
        scope: str,
        *,
        name: str,
        description: str | None = None,
        status_code: int = 200,
    ) -> Callable[[Endpoint], Endpoint]:
        """Declare an endpoint. The decorated function has the tenant's name and description.

        scope: what a tenant's key needs.   name, description: the operator's; by default the
        function's description, of a tenant in place of the tenant.
        """

        async def own(
            request: Request, identity: Annotated[Identity, Depends(Scoped(scope))]
        ) -> None:
            request.state.account = Account(identity.tenant_id, identity)

        def declare(endpoint: Endpoint) -> Endpoint:
            asked: dict[str, Any] = {"methods": [method], "status_code": status_code}
            self.router.add_api_route(path, endpoint, dependencies=[Depends(own)], **asked)
            operators = {"name": name, "description": description or _of_any(endpoint)}
            return self.operators(method, path, status_code=status_code, **operators)(endpoint)

        return declare

    def operators(self, method: str, path: str, **asked: Any) -> Callable[[Endpoint], Endpoint]:
        """Declare an endpoint for the operator alone."""
        return self.admin_router.api_route(
            self._prefix + path, methods=[method], dependencies=[Depends(self._account)], **asked
        )


def _of_any(endpoint: Callable[..., Any]) -> str:
    return inspect.cleandoc(endpoint.__doc__ or "").replace("the tenant", "a tenant", 1)
