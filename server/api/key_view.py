"""API keys as answers show them."""

from typing import Literal

from pydantic import Field

from server.accounts.keys import ApiKey
from server.api.answer import Answer
from server.api.routes.lists import Page
from server.text.times import unix_seconds


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


def key_view(key: ApiKey) -> KeyAnswer:
    return KeyAnswer(
        key_id=key.key_id,
        name=key.name,
        prefix=key.prefix,
        scopes=sorted(key.scopes),
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_concurrency=key.max_concurrency,
        created_by=key.created_by,
        replaces=key.replaces,
        created_at=key.created_at_ms // 1000,
        expires_at=unix_seconds(key.expires_at_ms),
        revoked_at=unix_seconds(key.revoked_at_ms),
        last_used_at=unix_seconds(key.last_used_at_ms),
    )
