"""API keys: the tenant's own, for keys with scope `admin`, and any tenant's, for the operator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from fastapi import Depends, Query
from pydantic import Field

from server.accounts import keys
from server.accounts.auth import ADMIN
from server.accounts.keys import MAX_NAME, MAX_OVERLAP_S, MAX_PAGE
from server.accounts.lineage import ApiKey
from server.api.accounts import AccountEndpoints, AccountRows, RowsDep
from server.api.answer import Answer, Page
from server.api.bodies import BodyFields, json_body
from server.api.deps import PepperDep
from server.api.times import UnixSeconds
from server.database.clock import now_ms
from server.text.json_object import JsonObject

both = AccountEndpoints()

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


class KeyAnswer(Answer):
    """An API key, without the key itself.

    prefix: the key's first characters.   created_by: the key that created it, null for the
    operator.   replaces: the key that it was rotated from.   A limit of null is none of its own.
    created_at, expires_at, revoked_at, last_used_at: in Unix seconds.
    """

    object: Literal["api_key"] = "api_key"
    key_id: str = Field(examples=["4Zk1rT8wQx2b"])
    name: str = Field(examples=["batch jobs"])
    prefix: str = Field(examples=["sk-chorale-4Zk1rT8wQx2b"])
    scopes: list[str] = Field(examples=[["adapters:read", "inference"]])
    requests_per_minute: int | None = Field(examples=[60])
    tokens_per_minute: int | None = Field(examples=[100_000])
    max_concurrency: int | None = Field(examples=[4])
    created_by: str | None = Field(examples=["9Hq3vB7nLs5d"])
    replaces: str | None = Field(examples=[None])
    created_at: int = Field(examples=[1_798_761_600])
    expires_at: int | None = Field(examples=[1_830_297_600])
    revoked_at: int | None = Field(examples=[None])
    last_used_at: int | None = Field(examples=[1_798_848_000])

    @classmethod
    def of_key(cls, key: ApiKey, **others: str) -> Self:
        return cls.of_record(key, scopes=sorted(key.scopes), **others)


class KeyMade(KeyAnswer):
    """A new API key.   api_key: the key itself, which no other answer carries."""

    api_key: str = Field(
        examples=["sk-chorale-4Zk1rT8wQx2b-7mQxG2sVb9JkTz4LwNpR6cYd3HfA8eUv1oKq0i"]
    )


class KeyPage(Page[KeyAnswer]):
    """A part of a tenant's API keys, oldest first."""

    first_id: str | None = Field(examples=["4Zk1rT8wQx2b"])
    last_id: str | None = Field(examples=["4Zk1rT8wQx2b"])


class KeyRevoked(Answer):
    """The answer to the revocation of an API key.   ended: ids of the keys that it revoked."""

    key_id: str = Field(examples=["4Zk1rT8wQx2b"])
    object: Literal["key.revoked"] = "key.revoked"
    revoked: Literal[True] = True
    ended: list[str] = Field(examples=[["4Zk1rT8wQx2b"]])


class AllKeysRevoked(Answer):
    """The answer to the revocation of all keys of a tenant.   ended: ids of the revoked keys."""

    object: Literal["keys.revoked"] = "keys.revoked"
    ended: list[str] = Field(examples=[["4Zk1rT8wQx2b", "9Hq3vB7nLs5d"]])


_TermsBody = Annotated[_Terms, json_body(_Terms)]
_RotationBody = Annotated[_Rotation, json_body(_Rotation)]


@dataclass(frozen=True, slots=True)
class _KeyRing(AccountRows):
    """The keys of an account, and what it takes to change them."""

    pepper: PepperDep

    async def change(self, change: Callable[..., T], *of: Any, **changes: Any) -> T:
        """Make a change.   of, changes: what it takes beside tenant, time and the key that asks."""
        by = self.account.by
        return await self.write(
            lambda conn, tenant_id: change(conn, tenant_id, *of, now_ms=now_ms(), by=by, **changes)
        )


_RingDep = Annotated[_KeyRing, Depends()]


@both(
    "POST",
    "/keys",
    ADMIN,
    name="create_key",
    description="Create an API key of a tenant; only this answer carries the key itself.",
    status_code=201,
)
async def create_own(ring: _RingDep, body: _TermsBody) -> KeyMade:
    """Create an API key of the tenant; only this answer carries the key itself.

    The new key cannot have more rights than the asking one.
    """
    given = {"name": "", **body.given()}
    key, plaintext = await ring.change(keys.create_key, pepper=ring.pepper, **given)
    return KeyMade.of_key(key, api_key=plaintext)


@both("GET", "/keys", ADMIN, name="list_keys")
async def list_own(ring: _RingDep, after: _After = None, limit: _PageSize = 100) -> KeyPage:
    """List the tenant's API keys, oldest first."""
    found = await ring.read(
        lambda conn, tenant_id: keys.list_keys(conn, tenant_id, after=after, limit=limit + 1)
    )
    return KeyPage.of(list(map(KeyAnswer.of_key, found)), lambda key: key.key_id, limit)


@both("GET", "/keys/{key_id}", ADMIN, name="get_key")
async def get_own(key_id: str, ring: _RingDep) -> KeyAnswer:
    """Get one of the tenant's API keys."""
    return KeyAnswer.of_key(
        await ring.read(lambda conn, tenant_id: keys.get_key(conn, tenant_id, key_id))
    )


@both("PATCH", "/keys/{key_id}", ADMIN, name="change_key")
async def change_own(key_id: str, ring: _RingDep, body: _TermsBody) -> KeyAnswer:
    """Change one of the tenant's API keys; fields that are left out stay as they are."""
    return KeyAnswer.of_key(await ring.change(keys.change_key, key_id, body.given()))


@both("POST", "/keys/{key_id}/rotate", ADMIN, name="rotate_key", status_code=201)
async def rotate_own(key_id: str, ring: _RingDep, body: _RotationBody) -> KeyMade:
    """Replace one of the tenant's API keys; only this answer carries the new key itself.

    The new key has the old one's terms and goes on with what is left of its limits; the old one
    stays valid for `overlap_s` seconds.
    """
    key, plaintext = await ring.change(
        keys.rotate_key,
        key_id,
        ring.pepper,
        overlap_s=body.overlap_s,
        is_compromised=body.compromised,
    )
    return KeyMade.of_key(key, api_key=plaintext)


@both("DELETE", "/keys/{key_id}", ADMIN, name="revoke_key")
async def revoke_own(key_id: str, ring: _RingDep, cascade: _Cascade = False) -> KeyRevoked:
    """Revoke one of the tenant's API keys, and with `cascade` all that came of it.

    Without it the keys that it made stay valid, but make no keys any more.
    """
    return KeyRevoked(
        key_id=key_id, ended=await ring.change(keys.revoke_key, key_id, cascade=cascade)
    )


@both.operators("DELETE", "/keys")
async def revoke_all_keys(rows: RowsDep) -> AllKeysRevoked:
    """Revoke all of a tenant's API keys at once."""
    return AllKeysRevoked(
        ended=await rows.write(
            lambda conn, tenant_id: keys.revoke_all(conn, tenant_id, now_ms=now_ms())
        )
    )
