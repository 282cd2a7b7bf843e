"""Endpoints about one tenant, which its own keys and the operator call at paths of their own."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection

from server.accounts import tenants
from server.accounts.auth import Identity
from server.api.deps import Scoped, operators_router, tenants_router

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
        return tenants.get_tenant(conn, self.tenant).tenant_id


async def _account_of(request: Request) -> Account:
    account: Account = request.state.account
    return account


AccountDep = Annotated[Account, Depends(_account_of)]


async def _named(request: Request, tenant: str) -> None:
    request.state.account = Account(tenant)


class AccountEndpoints:
    """Two routers that have the same endpoints, each a function of an `AccountDep`.

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
            self.admin_router.add_api_route(
                self._prefix + path,
                endpoint,
                dependencies=[Depends(self._account)],
                name=name,
                description=description or _of_any(endpoint),
                **asked,
            )
            return endpoint

        return declare


def _of_any(endpoint: Callable[..., Any]) -> str:
    return inspect.cleandoc(endpoint.__doc__ or "").replace("the tenant", "a tenant", 1)
