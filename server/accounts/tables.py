"""Tenants and their keys, on the metadata of the registry's tables. Times are Unix milliseconds."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Integer,
    String,
    Table,
    Text,
    false,
)

from registry.tables import metadata
from server.limits.amounts import LIMITS

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("status", String(16), nullable=False),
    *(Column(name, Integer) for name in LIMITS),
    Column("max_queue_share", Float),
    Column("weight", Float, nullable=False),
    Column("max_adapters", Integer),
    Column("max_adapter_bytes_total", BigInteger),
    # The plan whose prices the tenant pays, unless there are prices for the tenant alone.
    Column("plan", String(64), nullable=False, server_default="standard"),
    # Whether fields that no request has are left out of its requests, not refused.
    Column("ignore_unknown_fields", Boolean, nullable=False, server_default=false()),
    # What its statements are addressed to.
    Column("legal_name", String(256)),
    Column("address", String(1024)),
    Column("cache_salt", String(64), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    CheckConstraint("status IN ('active', 'suspended')", name="status"),
    CheckConstraint("weight > 0", name="weight"),
)

# hmac: HMAC of the whole key under the pepper, in hex.   prefix: the part that may be shown.
# created_by: id of the key that made it, whose scopes bound its own; NULL for the operator.
# replaces: id of the key that it was made to replace.   bucket_id: id under which its limits count,
# the first key's of a row of rotations.
api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", String(32), primary_key=True),
    Column("tenant_id", String(64), ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("name", String(128), nullable=False),
    Column("hmac", String(64), nullable=False),
    Column("prefix", String(32), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("created_by", String(32)),
    Column("replaces", String(32)),
    Column("bucket_id", String(32), nullable=False),
    *(Column(name, Integer) for name in LIMITS),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger),
    Column("revoked_at_ms", BigInteger),
    Column("last_used_at_ms", BigInteger),
)

# Sessions of the console. token_sha256: hash of what the cookie holds.   key_id: the key that was
# shown, or `operator`.   key_hmac: its HMAC, as of a key that the session ends with.
console_sessions = Table(
    "console_sessions",
    metadata,
    Column("token_sha256", String(64), primary_key=True),
    Column("key_id", String(32), nullable=False, index=True),
    Column("key_hmac", String(64), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False, index=True),
)
