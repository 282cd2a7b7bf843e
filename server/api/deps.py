"""Dependencies of endpoints: single parts of the gateway, and the caller's identity.

Authentication is a dependency of every router; nothing here looks at a path.
"""

import hmac
from collections.abc import Callable
from ipaddress import ip_network
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from registry.catalog.catalog import Catalog
from registry.errors import Forbidden, InvalidApiKey
from registry.storage.free_space import FreeSpace
from registry.storage.storage import Storage
from registry.uploads.rules import RegistryLimits
from server import logs
from server.accounts import auth
from server.accounts.auth import Identity
from server.accounts.identities import Identities
from server.accounts.sessions import Sessions, csrf_token
from server.adapters.prover import Prover
from server.adapters.spool import Spool
from server.adapters.upload_builds import UploadBuilds
from server.api import errors
from server.api.adapter_view import AdapterView
from server.api.addresses import is_in
from server.api.gateway import Gateway
from server.api.http_protocol import LimitedProtocol
from server.api.metrics import Metrics
from server.api.neighbours import Neighbours
from server.api.serving import Serving
from server.billing.audit.auditor import Auditor
from server.billing.ledger_probe import LedgerProbe
from server.billing.price_tags import PriceTags
from server.billing.receipts.signing import Signer
from server.billing.settler import Settler
from server.billing.statements import Statements
from server.database.database import Database
from server.inference.base_follower import BaseFollower
from server.inference.bases import Bases
from server.inference.cancels import Cancels
from server.inference.drain import Drain
from server.inference.encoders import Encoders
from server.inference.routes import Routes
from server.launch.settings import Settings
from server.limits.inflow import Inflow
from server.limits.memory import MemoryLimiter
from server.webhooks.urls import UrlRules

_bearer = HTTPBearer(auto_error=False)
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _part(pick: Callable[[Gateway], object]) -> Any:
    """A dependency that is one part of the gateway."""

    # Async: FastAPI would call a plain function on a thread.
    async def part(request: Request) -> object:
        return pick(gateway_of(request))

    return Depends(part)


AdapterViewDep = Annotated[AdapterView, _part(lambda it: AdapterView(it.catalog, it.bases))]
AuditorDep = Annotated[Auditor, _part(lambda gateway: gateway.auditor)]
BodiesDep = Annotated[Inflow, _part(lambda gateway: gateway.bodies)]
BasesDep = Annotated[Bases, _part(lambda gateway: gateway.bases)]
CancelsDep = Annotated[Cancels, _part(lambda gateway: gateway.cancels)]
CatalogDep = Annotated[Catalog, _part(lambda gateway: gateway.catalog)]
UploadBuildsDep = Annotated[UploadBuilds, _part(lambda gateway: gateway.upload_builds)]
DatabaseDep = Annotated[Database, _part(lambda gateway: gateway.database)]
DrainDep = Annotated[Drain, _part(lambda gateway: gateway.drain)]
EncodersDep = Annotated[Encoders, _part(lambda gateway: gateway.encoders)]
FollowerDep = Annotated[BaseFollower, _part(lambda gateway: gateway.follower)]
IdentitiesDep = Annotated[Identities, _part(lambda gateway: gateway.identities)]
LedgerProbeDep = Annotated[LedgerProbe, _part(lambda gateway: gateway.ledger_probe)]
LimiterDep = Annotated[MemoryLimiter, _part(lambda gateway: gateway.limiter)]
MetricsDep = Annotated[Metrics, _part(lambda gateway: gateway.metrics)]
NeighboursDep = Annotated[Neighbours | None, _part(lambda gateway: gateway.neighbours)]
PepperDep = Annotated[str, _part(lambda gateway: gateway.pepper)]
PriceTagsDep = Annotated[PriceTags, _part(lambda gateway: gateway.price_tags)]
ProverDep = Annotated[Prover, _part(lambda gateway: gateway.prover)]
RegistryLimitsDep = Annotated[RegistryLimits, _part(lambda gateway: gateway.registry_limits)]
RoutesDep = Annotated[Routes, _part(lambda gateway: gateway.routes)]
ServingDep = Annotated[Serving, _part(lambda gateway: gateway.serving)]
SessionsDep = Annotated[Sessions, _part(lambda gateway: gateway.sessions)]
SettingsDep = Annotated[Settings, _part(lambda gateway: gateway.settings)]
SettlerDep = Annotated[Settler, _part(lambda gateway: gateway.settler)]
SignerDep = Annotated[Signer, _part(lambda gateway: gateway.signer)]
SpaceDep = Annotated[FreeSpace, _part(lambda gateway: gateway.space)]
SpoolDep = Annotated[Spool, _part(lambda gateway: gateway.spool)]
StatementsDep = Annotated[Statements, _part(lambda gateway: gateway.statements)]
StorageDep = Annotated[Storage, _part(lambda gateway: gateway.storage)]
WebhookRulesDep = Annotated[UrlRules, _part(lambda gateway: gateway.webhook_rules)]


# ---- the caller ----

_OPERATOR = "operator"
"""Stands for a tenant's id where the operator's own requests are counted."""
_ADMIN_KEY_AT_V1 = "This is the operator's admin key. Send it to /admin/v1, and an API key to /v1."
_NO_SCRAPER = (
    "Your address may not read /metrics. The server's operator can name it, and the proxies that "
    "it comes through, in the setting metrics_networks; the admin key reads it from anywhere."
)
_API_KEY_AT_ADMIN = "This looks like a tenant's API key. Send it to /v1, and the admin key here."


def _count_as(request: Request, tenant_id: str) -> None:
    """Count the request's connection and its body among those of the tenant.

    Raises Invalid if the tenant has its share of connections.
    """
    request.state.tenant_id = tenant_id
    connection: LimitedProtocol | None = getattr(request.state, "connection", None)
    if connection is not None:
        connection.show_key(tenant_id)


SESSION_COOKIE = "chorale_session"
CSRF_HEADER = "x-chorale-csrf"


def _session_of(request: Request) -> str:
    """The token of the console's session that a request without a key is made in.

    Raises 401 without one, and without its CSRF token, which a page of another site cannot send.
    """
    token, csrf = request.cookies.get(SESSION_COOKIE), request.headers.get(CSRF_HEADER)
    if not token or csrf is None:
        raise errors.missing_api_key()
    if not hmac.compare_digest(csrf.encode(), csrf_token(token).encode()):
        raise InvalidApiKey(f"The header {CSRF_HEADER} is not that of the session.")
    return token


async def authenticate(request: Request, bearer: Bearer) -> Identity:
    """The tenant and key of a request, or of the session that it is made in.

    Raises 401, and 403 for a suspended tenant.
    """
    if bearer is None:
        token = _session_of(request)
        identity = await gateway_of(request).sessions.identity_of(token)
    else:
        try:
            identity = await gateway_of(request).identities.of(bearer.credentials)
        except InvalidApiKey:
            if gateway_of(request).admin_key.is_it(bearer.credentials):
                raise InvalidApiKey(_ADMIN_KEY_AT_V1) from None
            raise
    return show_identity(request, identity)


def show_identity(request: Request, identity: Identity) -> Identity:
    """Let the parts that count by tenant, key uses and the log know whose request it is."""
    _count_as(request, identity.tenant_id)
    gateway_of(request).key_uses.note(identity.key_id)
    logs.note(tenant_id=identity.tenant_id, key_id=identity.key_id)
    return identity


IdentityDep = Annotated[Identity, Depends(authenticate)]


class Scoped:
    """A dependency that is the caller's identity if its key has the scope. Raises 403."""

    def __init__(self, scope: str) -> None:
        self.scope = scope

    async def __call__(self, identity: IdentityDep) -> Identity:
        if not identity.allows(self.scope):
            raise errors.insufficient_permissions(self.scope)
        return identity


InferenceKey = Annotated[Identity, Depends(Scoped(auth.INFERENCE))]
AdaptersReadKey = Annotated[Identity, Depends(Scoped(auth.ADAPTERS_READ))]
AdaptersWriteKey = Annotated[Identity, Depends(Scoped(auth.ADAPTERS_WRITE))]
UsageKey = Annotated[Identity, Depends(Scoped(auth.USAGE_READ))]
TenantAdminKey = Annotated[Identity, Depends(Scoped(auth.ADMIN))]


def show_operator(request: Request) -> None:
    """Let the parts that count by tenant know that a request is the operator's."""
    _count_as(request, _OPERATOR)


async def require_admin(request: Request, bearer: Bearer) -> None:
    """Refuse every key and session but the operator's. Raises 401."""
    if not await _is_operators(request, bearer):
        if bearer and bearer.credentials.startswith("sk-chorale-"):
            raise InvalidApiKey(_API_KEY_AT_ADMIN)
        raise InvalidApiKey()
    show_operator(request)


async def require_scraper(request: Request, bearer: Bearer, settings: SettingsDep) -> None:
    """Refuse all but the operator, and clients in `metrics_networks`. Raises 403.

    A client behind a proxy is in them if the proxy is, and all that X-Forwarded-For names.
    """
    if bearer and gateway_of(request).admin_key.is_it(bearer.credentials):
        show_operator(request)
        return
    forwarded = ",".join(request.headers.getlist("x-forwarded-for"))
    hosts = [request.client.host if request.client else "", *filter(None, forwarded.split(","))]
    networks = [ip_network(network) for network in settings.metrics_networks]
    if not all(is_in(host.strip(), networks) for host in hosts):
        raise Forbidden(_NO_SCRAPER)


def tenants_router(prefix: str = "") -> APIRouter:
    """A router of endpoints for tenants; each takes their keys and sessions."""
    return APIRouter(prefix=f"/v1{prefix}", dependencies=[Depends(authenticate)])


def operators_router() -> APIRouter:
    """A router of endpoints for the operator alone."""
    return APIRouter(prefix="/admin/v1", dependencies=[Depends(require_admin)])


async def _is_operators(request: Request, bearer: Bearer) -> bool:
    """Whether a request is the operator's. Raises 401 without a key and a session."""
    if bearer is None:
        token = _session_of(request)
        return await gateway_of(request).sessions.is_operators(token)
    return gateway_of(request).admin_key.is_it(bearer.credentials)


async def usage_reader(request: Request, bearer: Bearer) -> str | None:
    """The tenant whose usage a key reads; None, which means every tenant, for the admin key."""
    if await _is_operators(request, bearer):
        show_operator(request)
        return None
    identity = await authenticate(request, bearer)
    return (await Scoped(auth.USAGE_READ)(identity)).tenant_id


UsageReader = Annotated[str | None, Depends(usage_reader)]
