"""The gateway's tables, beside the registry's in one MetaData. Times are Unix milliseconds.

Money rows name tenants and keys without foreign keys: usage outlives what it was used with.
"""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from registry.tables import RowId, metadata

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("status", String(16), nullable=False),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("max_concurrency", Integer),
    Column("weight", Float, nullable=False),
    Column("max_adapters", Integer),
    Column("max_adapter_bytes_total", BigInteger),
    Column("cache_salt", String(64), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    CheckConstraint("status IN ('active', 'suspended')", name="status"),
    CheckConstraint("weight > 0", name="weight"),
)

# hmac: of the whole key under the pepper, hex.   prefix: the part of the key that may be shown.
api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", String(32), primary_key=True),
    Column("tenant_id", String(64), ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("name", String(128), nullable=False),
    Column("hmac", String(64), nullable=False),
    Column("prefix", String(32), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger),
    Column("revoked_at_ms", BigInteger),
    Column("last_used_at_ms", BigInteger),
)

# Never updated: another price is another version. storage, pinned: of a GB for an hour.
price_versions = Table(
    "price_versions",
    metadata,
    Column("price_version", Integer, primary_key=True, autoincrement=True),
    Column("effective_at_ms", BigInteger, nullable=False, index=True),
    Column("prompt_nanousd", BigInteger, nullable=False),
    Column("cached_nanousd", BigInteger, nullable=False),
    Column("completion_nanousd", BigInteger, nullable=False),
    Column("storage_nanousd", BigInteger, nullable=False, server_default="0"),
    Column("pinned_nanousd", BigInteger, nullable=False, server_default="0"),
    Column("created_at_ms", BigInteger, nullable=False),
    CheckConstraint(
        "prompt_nanousd >= 0 AND cached_nanousd >= 0 AND completion_nanousd >= 0",
        name="not_negative",
    ),
    sqlite_autoincrement=True,
)

# model: the name that was asked for.   token_lease: completion tokens that the amount covers.
holds = Table(
    "holds",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("model", String(256), nullable=False),
    Column("adapter_id", String(64)),
    Column("adapter_version", Integer),
    Column("adapter_digest", String(64)),
    Column("price_version", Integer, ForeignKey("price_versions.price_version"), nullable=False),
    Column("amount_nanousd", BigInteger, nullable=False),
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("token_lease", Integer, nullable=False),
    Column("engine_id", String(64), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False),
    Column("state", String(8), nullable=False),
    Column("resolved_at_ms", BigInteger),
    CheckConstraint("state IN ('open', 'posted', 'voided')", name="state"),
    CheckConstraint("(state = 'open') = (resolved_at_ms IS NULL)", name="resolved"),
)
_IS_OPEN = holds.c.state == "open"
Index(
    "ix_holds_open_engine",
    holds.c.engine_id,
    holds.c.expires_at_ms,
    sqlite_where=_IS_OPEN,
    postgresql_where=_IS_OPEN,
)
Index("ix_holds_open_tenant", holds.c.tenant_id, sqlite_where=_IS_OPEN, postgresql_where=_IS_OPEN)

# One row per request that an engine ended: what a bill is made of. Never updated.
usage_events = Table(
    "usage_events",
    metadata,
    Column("event_id", RowId, primary_key=True, autoincrement=True),
    Column("engine_id", String(64), nullable=False),
    Column("journal_seq", BigInteger, nullable=False),
    Column("request_id", String(64), nullable=False, unique=True),
    Column("tenant_id", String(64), nullable=False),
    Column("key_id", String(32)),
    Column("model", String(256)),
    Column("adapter_id", String(64)),
    Column("adapter_version", Integer),
    Column("adapter_digest", String(64)),
    Column("base_revision", String(64), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("finish_reason", String(16), nullable=False),
    Column("stop_cause", String(32), nullable=False),
    Column("output_sha256", String(64), nullable=False),
    Column("price_version", Integer, ForeignKey("price_versions.price_version")),
    Column("amount_nanousd", BigInteger, nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("first_token_at_ms", BigInteger),
    Column("ended_at_ms", BigInteger, nullable=False),
    Column("posted_at_ms", BigInteger, nullable=False),
    UniqueConstraint("engine_id", "journal_seq"),
    Index("ix_usage_events_tenant", "tenant_id", "ended_at_ms", "event_id"),
    Index("ix_usage_events_ended", "ended_at_ms", "event_id"),
    sqlite_autoincrement=True,
)

journal_positions = Table(
    "journal_positions",
    metadata,
    Column("engine_id", String(64), primary_key=True),
    Column("settled_seq", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
)

# What should not have happened to money, for a person to look at; never deleted by the gateway.
incidents = Table(
    "incidents",
    metadata,
    Column("incident_id", RowId, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False, index=True),
    Column("kind", String(64), nullable=False),
    Column("engine_id", String(64)),
    Column("request_id", String(64)),
    Column("detail", Text, nullable=False),
    sqlite_autoincrement=True,
)
