"""API keys: made once, stored as HMAC under a pepper, found by their public part.

A key is `sk-chorale-<id, 12>-<secret, 32><checksum, 6>`, all base62; the secret has 190 bits.

AuthError
├── InvalidApiKey     unknown, revoked, expired or garbled: one answer for all
├── TenantSuspended   the key is good, its tenant is not
└── KeyNotFound       no such key of this tenant, when it is managed
"""

import hmac
import json
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from registry.audit import record_audit
from server.limiter.rules import Limit, Metric, Scope
from server.tables import api_keys, tenants

INFERENCE, ADMIN = "inference", "admin"
ADAPTERS_READ, ADAPTERS_WRITE = "adapters:read", "adapters:write"
USAGE_READ = "usage:read"
SCOPES = frozenset({INFERENCE, ADAPTERS_READ, ADAPTERS_WRITE, USAGE_READ, ADMIN})
# `admin` makes its holder the tenant's admin, so it is given on purpose only.
DEFAULT_SCOPES = SCOPES - {ADMIN}

# What tenants and keys may be limited in: the column, and what the limiter calls it.
LIMITS: dict[str, Metric] = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "max_concurrency": "concurrency",
}

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_KEY = re.compile(r"(sk-chorale-([0-9A-Za-z]{12})-[0-9A-Za-z]{32})([0-9A-Za-z]{6})")


class AuthError(Exception):
    """Everything this module raises."""


class InvalidApiKey(AuthError):
    """Says nothing of why: the difference between unknown and revoked is worth guessing for."""

    def __init__(self) -> None:
        super().__init__("Incorrect API key provided.")


class TenantSuspended(AuthError):
    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        super().__init__("This account is suspended.")


class KeyNotFound(AuthError):
    def __init__(self, key_id: str) -> None:
        self.key_id = key_id
        super().__init__(f"There is no API key {key_id!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as it may be listed: everything but the key."""

    key_id: str
    tenant_id: str
    name: str
    prefix: str
    scopes: frozenset[str]
    created_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None
    last_used_at_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks, and what they may take: all that a request needs of its tenant.

    limits: of the tenant and of the key, those that are set.
    max_queue_share: of what waits for the engine, in (0, 1].
    """

    tenant_id: str
    tenant_name: str
    key_id: str
    scopes: frozenset[str]
    weight: float
    cache_salt: str = field(repr=False)
    limits: tuple[Limit, ...] = ()
    max_queue_share: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    max_adapters: int | None = None
    max_adapter_bytes_total: int | None = None

    @property
    def actor(self) -> str:
        """Whom the audit log names."""
        return f"key:{self.key_id}"

    def allows(self, scope: str) -> bool:
        return scope in self.scopes


def create_key(
    conn: Connection,
    tenant_id: str,
    name: str,
    pepper: str,
    *,
    now_ms: int,
    scopes: Iterable[str] = DEFAULT_SCOPES,
    expires_at_ms: int | None = None,
    actor: str = "operator",
) -> tuple[ApiKey, str]:
    """A new key and its plaintext, which exists nowhere else from here on."""
    granted = frozenset(scopes)
    assert granted <= SCOPES, f"unknown scopes {granted - SCOPES}"
    key_id, plaintext = _make_key()
    key = ApiKey(
        key_id=key_id,
        tenant_id=tenant_id,
        name=name,
        prefix=f"sk-chorale-{key_id}",
        scopes=granted,
        created_at_ms=now_ms,
        expires_at_ms=expires_at_ms,
    )
    conn.execute(
        sa.insert(api_keys).values(
            key_id=key_id,
            tenant_id=tenant_id,
            name=name,
            hmac=_digest(pepper, plaintext),
            prefix=key.prefix,
            scopes=json.dumps(sorted(granted)),
            created_at_ms=now_ms,
            expires_at_ms=expires_at_ms,
        )
    )
    record_audit(conn, at_ms=now_ms, actor=actor, action="key.create", target=key_id, detail=name)
    return key, plaintext


def revoke_key(
    conn: Connection, tenant_id: str, key_id: str, *, now_ms: int, actor: str = "operator"
) -> None:
    """The key is refused from now on; again is fine. Raises KeyNotFound, also for another's key."""
    is_it = (api_keys.c.tenant_id == tenant_id) & (api_keys.c.key_id == key_id)
    row = conn.execute(sa.select(api_keys.c.revoked_at_ms).where(is_it)).first()
    if row is None:
        raise KeyNotFound(key_id)
    if row.revoked_at_ms is None:
        conn.execute(sa.update(api_keys).where(is_it).values(revoked_at_ms=now_ms))
        record_audit(conn, at_ms=now_ms, actor=actor, action="key.revoke", target=key_id)


def list_keys(conn: Connection, tenant_id: str) -> list[ApiKey]:
    """All keys of a tenant, the revoked too, oldest first."""
    query = sa.select(api_keys).where(api_keys.c.tenant_id == tenant_id)
    rows = conn.execute(query.order_by(api_keys.c.created_at_ms, api_keys.c.key_id))
    return [_api_key(row._mapping) for row in rows]


def authenticate(conn: Connection, plaintext: str, pepper: str, now_ms: int) -> Identity:
    """Whose key this is. Raises InvalidApiKey, TenantSuspended."""
    key_id = parse_key(plaintext)
    query = (
        sa.select(api_keys.c.hmac, api_keys.c.expires_at_ms, api_keys.c.revoked_at_ms)
        .add_columns(api_keys.c.key_id, api_keys.c.scopes, tenants)
        .add_columns(*(api_keys.c[name].label(f"key_{name}") for name in LIMITS))
        .join(tenants, tenants.c.tenant_id == api_keys.c.tenant_id)
        .where(api_keys.c.key_id == key_id)
    )
    row = conn.execute(query).first()
    # Compared for an unknown id too: whether an id exists must not be told by the time it takes.
    is_ours = hmac.compare_digest(_digest(pepper, plaintext), row.hmac if row else "0" * 64)
    if row is None or not is_ours or row.revoked_at_ms is not None:
        raise InvalidApiKey
    if row.expires_at_ms is not None and row.expires_at_ms <= now_ms:
        raise InvalidApiKey
    if row.status != "active":
        raise TenantSuspended(row.tenant_id)
    return Identity(
        tenant_id=row.tenant_id,
        tenant_name=row.name,
        key_id=row.key_id,
        scopes=frozenset(json.loads(row.scopes)),
        weight=row.weight,
        cache_salt=row.cache_salt,
        limits=(
            *_limits("tenant", row.tenant_id, row, ""),
            *_limits("key", row.key_id, row, "key_"),
        ),
        max_queue_share=row.max_queue_share,
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        max_concurrency=row.max_concurrency,
        max_adapters=row.max_adapters,
        max_adapter_bytes_total=row.max_adapter_bytes_total,
    )


def _limits(scope: Scope, scope_id: str, row: sa.Row[Any], prefix: str) -> list[Limit]:
    """Those that are set."""
    amounts = ((metric, getattr(row, prefix + name)) for name, metric in LIMITS.items())
    return [
        Limit(metric, scope, scope_id, amount) for metric, amount in amounts if amount is not None
    ]


def record_key_use(conn: Connection, last_used_at_ms: Mapping[str, int]) -> None:
    """Note when keys were last used: {key_id: time}, gathered by the caller and written rarely."""
    for key_id, at_ms in last_used_at_ms.items():
        is_older = sa.func.coalesce(api_keys.c.last_used_at_ms, 0) < at_ms
        query = sa.update(api_keys).where(api_keys.c.key_id == key_id, is_older)
        conn.execute(query.values(last_used_at_ms=at_ms))


def parse_key(plaintext: str) -> str:
    """The public id of a well-formed key. Raises InvalidApiKey before any database is asked."""
    match = _KEY.fullmatch(plaintext)
    if match is None or not hmac.compare_digest(_checksum(match[1]), match[3]):
        raise InvalidApiKey
    return match[2]


def _make_key() -> tuple[str, str]:
    key_id = _random_base62(12)
    body = f"sk-chorale-{key_id}-{_random_base62(32)}"
    return key_id, body + _checksum(body)


def _random_base62(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = ""
    for _ in range(6):
        number, digit = divmod(number, 62)
        digits = _BASE62[digit] + digits
    return digits


def _digest(pepper: str, plaintext: str) -> str:
    return hmac.new(pepper.encode(), plaintext.encode(), "sha256").hexdigest()


def _api_key(row: RowMapping) -> ApiKey:
    values = {name: row[name] for name in ApiKey.__slots__ if name != "scopes"}
    return ApiKey(scopes=frozenset(json.loads(row["scopes"])), **values)
