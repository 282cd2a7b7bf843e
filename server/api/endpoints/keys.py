"""API keys: the tenant's own, for keys with scope `admin`, and any tenant's, for the operator."""

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Query
from pydantic import Field
from sqlalchemy import Connection

from server.accounts import keys, tenants
from server.accounts.auth import Identity
from server.accounts.keys import MAX_NAME, MAX_OVERLAP_S, MAX_PAGE, ApiKey
from server.api.bodies import BodyFields, json_body
from server.api.deps import (
    DatabaseDep,
    IdentitiesDep,
    PepperDep,
    TenantAdminKey,
    operators_router,
    tenants_router,
)
from server.api.key_view import AllKeysRevoked, KeyAnswer, KeyMade, KeyPage, KeyRevoked
from server.api.times import UnixSeconds
from server.database.clock import now_ms
from server.text.json_object import JsonObject

router = tenants_router()
admin_router = operators_router()

T = TypeVar("T")

_MAX_SCOPES = 16

_Limit = Annotated[int | None, Field(ge=1, lt=1 << 31)]
_After = Annotated[str | None, Query(max_length=32)]
_PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]
_Cascade = Annotated[
    bool,
    Query(description="Revoke its other rotations, the keys that they made, and so on, as well."),
]


class _Terms(BodyFields):
    """The terms of an API key.

    A key that is created by another key has the limits and the end of that key where it is given
    none.

    name: a name to know it by.   scopes: what it allows; null for all scopes but admin.
    expires_at: its end in Unix seconds; null for none.
    requests_per_minute: the most requests a minute; null for no limit.
    tokens_per_minute: the most tokens of prompts and answers a minute; null for no limit.
    max_concurrency: the most requests under way at once; null for no limit.
    """

    name: str = Field("", max_length=MAX_NAME)
    scopes: list[Annotated[str, Field(max_length=64)]] | None = Field(None, max_length=_MAX_SCOPES)
    expires_at: UnixSeconds | None = Field(None, ge=0)
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    max_concurrency: _Limit = None

    def given(self) -> JsonObject:
        """The terms that were given, in the form that server.accounts.keys takes."""
        given = self.model_dump(exclude_unset=True)
        if "expires_at" in given:
            expires_at = given.pop("expires_at")
            given["expires_at_ms"] = None if expires_at is None else expires_at * 1000
        if "scopes" in given:
            given["scopes"] = None if self.scopes is None else frozenset(self.scopes)
        return given


class _Rotation(BodyFields):
    """The rotation of an API key.

    overlap_s: how long the old key stays valid, in seconds; at most seven days.
    compromised: whether the old key and all that came of it are revoked; then overlap_s is 0.
    """

    overlap_s: int = Field(ge=0, le=MAX_OVERLAP_S)
    compromised: bool = False


_TermsBody = Annotated[_Terms, json_body(_Terms)]
_RotationBody = Annotated[_Rotation, json_body(_Rotation)]


class _KeyRing:
    """The keys of tenants: what a tenant's admin and the operator do alike.

    by: the admin's key, or None for the operator.
    """

    def __init__(self, database: DatabaseDep, identities: IdentitiesDep, pepper: PepperDep) -> None:
        self._database = database
        self._identities = identities
        self._pepper = pepper

    async def tenant_id(self, tenant: str) -> str:
        """The id of a tenant, given by id or name. Raises NotFound."""
        found = await self._database.read(lambda conn: tenants.get_tenant(conn, tenant))
        return found.tenant_id

    async def create(self, tenant_id: str, body: _Terms, by: Identity | None = None) -> KeyMade:
        def create(conn: Connection) -> tuple[ApiKey, str]:
            given = {"name": "", **body.given()}
            return keys.create_key(
                conn, tenant_id, pepper=self._pepper, now_ms=now_ms(), by=by, **given
            )

        key, plaintext = await self._database.write(create)
        return KeyMade.of_key(key, api_key=plaintext)

    async def page(self, tenant_id: str, after: str | None, limit: int) -> KeyPage:
        found = await self._database.read(
            lambda conn: keys.list_keys(conn, tenant_id, after=after, limit=limit + 1)
        )
        return KeyPage.of(list(map(KeyAnswer.of_key, found)), lambda key: key.key_id, limit)

    async def get(self, tenant_id: str, key_id: str) -> KeyAnswer:
        return KeyAnswer.of_key(
            await self._database.read(lambda conn: keys.get_key(conn, tenant_id, key_id))
        )

    async def change(
        self, tenant_id: str, key_id: str, body: _Terms, by: Identity | None = None
    ) -> KeyAnswer:
        def change(conn: Connection) -> ApiKey:
            return keys.change_key(conn, tenant_id, key_id, body.given(), now_ms=now_ms(), by=by)

        return KeyAnswer.of_key(await self._write(tenant_id, change))

    async def rotate(
        self, tenant_id: str, key_id: str, body: _Rotation, by: Identity | None = None
    ) -> KeyMade:
        def rotate(conn: Connection) -> tuple[ApiKey, str]:
            return keys.rotate_key(
                conn,
                tenant_id,
                key_id,
                self._pepper,
                overlap_s=body.overlap_s,
                is_compromised=body.compromised,
                now_ms=now_ms(),
                by=by,
            )

        key, plaintext = await self._write(tenant_id, rotate)
        return KeyMade.of_key(key, api_key=plaintext)

    async def revoke(
        self, tenant_id: str, key_id: str, cascade: bool, by: Identity | None = None
    ) -> KeyRevoked:
        def revoke(conn: Connection) -> list[str]:
            return keys.revoke_key(conn, tenant_id, key_id, cascade=cascade, now_ms=now_ms(), by=by)

        return KeyRevoked(key_id=key_id, ended=await self._write(tenant_id, revoke))

    async def revoke_all(self, tenant_id: str) -> AllKeysRevoked:
        def revoke(conn: Connection) -> list[str]:
            return keys.revoke_all(conn, tenant_id, now_ms=now_ms())

        return AllKeysRevoked(ended=await self._write(tenant_id, revoke))

    async def _write(self, tenant_id: str, write: Callable[[Connection], T]) -> T:
        """Make a change that this gateway's next request sees."""
        try:
            return await self._database.write(write)
        finally:
            self._identities.forget(tenant_id)


_RingDep = Annotated[_KeyRing, Depends()]


# ---- a tenant's admin ----


@router.post("/keys", status_code=201)
async def create_own(ring: _RingDep, identity: TenantAdminKey, body: _TermsBody) -> KeyMade:
    """Create an API key of the tenant; only this answer carries the key itself.

    The new key cannot have more rights than the asking one.
    """
    return await ring.create(identity.tenant_id, body, identity)


@router.get("/keys")
async def list_own(
    ring: _RingDep, identity: TenantAdminKey, after: _After = None, limit: _PageSize = 100
) -> KeyPage:
    """List the tenant's API keys, oldest first."""
    return await ring.page(identity.tenant_id, after, limit)


@router.get("/keys/{key_id}")
async def get_own(key_id: str, ring: _RingDep, identity: TenantAdminKey) -> KeyAnswer:
    """Get one of the tenant's API keys."""
    return await ring.get(identity.tenant_id, key_id)


@router.patch("/keys/{key_id}")
async def change_own(
    key_id: str, ring: _RingDep, identity: TenantAdminKey, body: _TermsBody
) -> KeyAnswer:
    """Change one of the tenant's API keys; fields that are left out stay as they are."""
    return await ring.change(identity.tenant_id, key_id, body, identity)


@router.post("/keys/{key_id}/rotate", status_code=201)
async def rotate_own(
    key_id: str, ring: _RingDep, identity: TenantAdminKey, body: _RotationBody
) -> KeyMade:
    """Replace one of the tenant's API keys; only this answer carries the new key itself.

    The new key has the old one's terms and goes on with what is left of its limits; the old one
    stays valid for `overlap_s` seconds.
    """
    return await ring.rotate(identity.tenant_id, key_id, body, identity)


@router.delete("/keys/{key_id}")
async def revoke_own(
    key_id: str, ring: _RingDep, identity: TenantAdminKey, cascade: _Cascade = False
) -> KeyRevoked:
    """Revoke one of the tenant's API keys, and with `cascade` all that came of it.

    Without it the keys that it made stay valid, but make no keys any more.
    """
    return await ring.revoke(identity.tenant_id, key_id, cascade, identity)


# ---- the operator ----


@admin_router.post("/tenants/{tenant}/keys", status_code=201)
async def create_key(tenant: str, ring: _RingDep, body: _TermsBody) -> KeyMade:
    """Create an API key of a tenant; only this answer carries the key itself."""
    return await ring.create(await ring.tenant_id(tenant), body)


@admin_router.get("/tenants/{tenant}/keys")
async def list_keys(
    tenant: str, ring: _RingDep, after: _After = None, limit: _PageSize = 100
) -> KeyPage:
    """List a tenant's API keys, oldest first."""
    return await ring.page(await ring.tenant_id(tenant), after, limit)


@admin_router.get("/tenants/{tenant}/keys/{key_id}")
async def get_key(tenant: str, key_id: str, ring: _RingDep) -> KeyAnswer:
    """Get one of a tenant's API keys."""
    return await ring.get(await ring.tenant_id(tenant), key_id)


@admin_router.patch("/tenants/{tenant}/keys/{key_id}")
async def change_key(tenant: str, key_id: str, ring: _RingDep, body: _TermsBody) -> KeyAnswer:
    """Change one of a tenant's API keys; fields that are left out stay as they are."""
    return await ring.change(await ring.tenant_id(tenant), key_id, body)


@admin_router.post("/tenants/{tenant}/keys/{key_id}/rotate", status_code=201)
async def rotate_key(tenant: str, key_id: str, ring: _RingDep, body: _RotationBody) -> KeyMade:
    """Replace one of a tenant's API keys; only this answer carries the new key itself.

    The new key has the old one's terms and goes on with what is left of its limits; the old one
    stays valid for `overlap_s` seconds.
    """
    return await ring.rotate(await ring.tenant_id(tenant), key_id, body)


@admin_router.delete("/tenants/{tenant}/keys/{key_id}")
async def revoke_key(
    tenant: str, key_id: str, ring: _RingDep, cascade: _Cascade = False
) -> KeyRevoked:
    """Revoke one of a tenant's API keys, and with `cascade` all that came of it.

    Without it the keys that it made stay valid, but make no keys any more.
    """
    return await ring.revoke(await ring.tenant_id(tenant), key_id, cascade)


@admin_router.delete("/tenants/{tenant}/keys")
async def revoke_all_keys(tenant: str, ring: _RingDep) -> AllKeysRevoked:
    """Revoke all of a tenant's API keys at once."""
    return await ring.revoke_all(await ring.tenant_id(tenant))
