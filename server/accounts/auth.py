"""Authentication: the form of an API key, and the identity that it gives.

A key is `sk-chorale-<id, 12>-<secret, 32><checksum, 6>`, all base62; the secret has 190 bits. A key
is stored as its HMAC under a pepper, and found by its id.
"""

import hmac
import re
import secrets
import zlib
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.errors import Forbidden, InvalidApiKey
from server.accounts.lineage import bounded_scopes, makers_of, parse_scopes
from server.accounts.tables import api_keys, tenants
from server.limits.amounts import LIMITS, Amounts
from server.limits.base_limits import limits_by_base, scope_id
from server.limits.rules import Limit

INFERENCE, ADMIN = "inference", "admin"
ADAPTERS_READ, ADAPTERS_WRITE = "adapters:read", "adapters:write"
USAGE_READ = "usage:read"
SCOPES = frozenset({INFERENCE, ADAPTERS_READ, ADAPTERS_WRITE, USAGE_READ, ADMIN})

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_KEY = re.compile(r"(sk-chorale-([0-9A-Za-z]{12})-[0-9A-Za-z]{32})([0-9A-Za-z]{6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The tenant and key of a request, with all that the request needs to know of them.

    scopes: those of the key that every key above it has as well.
    limits: those that are set for the tenant, for the key and for every key above it.
    base_limits: those that are set for the tenant on base models.
    max_queue_share: share of the engines' queues that the tenant may hold, in (0, 1].
    has_hard_budget: whether the tenant's holds must be covered by the rest of its budget.
    ignores_unknown_fields: whether fields that no request has are left out, not refused.
    """

    tenant_id: str
    tenant_name: str
    key_id: str
    scopes: frozenset[str]
    weight: float
    cache_salt: str = field(repr=False)
    expires_at_ms: int | None = None
    limits: tuple[Limit, ...] = ()
    base_limits: tuple[Limit, ...] = ()
    max_queue_share: float | None = None
    has_hard_budget: bool = False
    ignores_unknown_fields: bool = False
    max_adapters: int | None = None
    max_adapter_bytes_total: int | None = None

    @property
    def actor(self) -> str:
        """Name of the key in the audit log."""
        return f"key:{self.key_id}"

    def limits_on(self, base_model: str) -> tuple[Limit, ...]:
        """The limits of a request on a base model or on its adapters, without the adapters' own."""
        if not self.base_limits:
            return self.limits
        counted_as = scope_id(self.tenant_id, base_model)
        return *self.limits, *(it for it in self.base_limits if it.scope_id == counted_as)

    def allows(self, scope: str) -> bool:
        return scope in self.scopes


def identify(
    conn: Connection,
    key_id: str,
    key_hmac: str,
    now_ms: int,
    has_hard_budget: sa.ColumnElement[bool],
) -> Identity:
    """The identity that the key of an id and an HMAC gives. Raises InvalidApiKey, Forbidden.

    has_hard_budget: SQL for whether a row of tenants has a hard budget; read in the same query.
    """
    query = (
        sa.select(tenants, api_keys.c.key_id, api_keys.c.hmac, api_keys.c.scopes)
        .add_columns(api_keys.c.created_by, api_keys.c.expires_at_ms, api_keys.c.revoked_at_ms)
        .add_columns(*(api_keys.c[name].label(f"key_{name}") for name in LIMITS))
        .add_columns(api_keys.c.bucket_id, has_hard_budget.label("has_hard_budget"))
        .join(tenants, tenants.c.tenant_id == api_keys.c.tenant_id)
        .where(api_keys.c.key_id == key_id)
    )
    row = conn.execute(query).first()
    # The HMAC is compared for an unknown id too, since the time must not tell whether an id exists.
    is_ours = hmac.compare_digest(key_hmac, row.hmac if row else "0" * 64)
    if row is None or not is_ours or row.revoked_at_ms is not None:
        raise InvalidApiKey
    if row.expires_at_ms is not None and row.expires_at_ms <= now_ms:
        raise InvalidApiKey
    if row.status != "active":
        raise Forbidden("This account is suspended.", code="tenant_suspended")
    makers = makers_of(conn, row.created_by)
    return Identity(
        tenant_id=row.tenant_id,
        tenant_name=row.name,
        key_id=row.key_id,
        scopes=bounded_scopes(parse_scopes(row.scopes), makers),
        weight=row.weight,
        cache_salt=row.cache_salt,
        expires_at_ms=row.expires_at_ms,
        limits=(
            *Amounts.read(row._mapping).limits("tenant", row.tenant_id),
            *Amounts.read(row._mapping, "key_").limits("key", row.bucket_id),
            *(limit for it in makers for limit in it.limits("key", it.bucket_id)),
        ),
        base_limits=limits_by_base(conn, row.tenant_id),
        max_queue_share=row.max_queue_share,
        has_hard_budget=row.has_hard_budget,
        ignores_unknown_fields=row.ignore_unknown_fields,
        max_adapters=row.max_adapters,
        max_adapter_bytes_total=row.max_adapter_bytes_total,
    )


def parse_key(plaintext: str) -> str:
    """The public id of a well-formed key. Raises InvalidApiKey, without asking a database."""
    match = _KEY.fullmatch(plaintext)
    if match is None or not hmac.compare_digest(_checksum(match[1]), match[3]):
        raise InvalidApiKey
    return match[2]


def make_key() -> tuple[str, str]:
    """Make a key. Returns its id and the whole key."""
    key_id = _random_base62(12)
    body = f"sk-chorale-{key_id}-{_random_base62(32)}"
    return key_id, body + _checksum(body)


def digest(pepper: str, plaintext: str) -> str:
    """The HMAC that is stored of a key, in hex."""
    return hmac.new(pepper.encode(), plaintext.encode(), "sha256").hexdigest()


def _random_base62(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = ""
    for _ in range(6):
        number, digit = divmod(number, 62)
        digits = _BASE62[digit] + digits
    return digits
