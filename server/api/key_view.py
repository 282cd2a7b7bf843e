"""API keys as answers show them."""

from typing import Literal, Self

from pydantic import Field

from server.accounts.lineage import ApiKey
from server.api.answer import Answer
from server.api.endpoints.lists import Page


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
