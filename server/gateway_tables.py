"""What gateways keep beside tenants and money: limits, liveness, answers to replay, webhooks.

Times are Unix milliseconds.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    true,
)

from registry.tables import metadata

# Of all that ask for one adapter, its owner and those it is shared with.   tenant_id: the owner.
adapter_limits = Table(
    "adapter_limits",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("max_concurrency", Integer),
)

# Gateways of this database that are alive: seen_at_ms is written again and again, on its clock.
gateways = Table(
    "gateways",
    metadata,
    Column("gateway_id", String(64), primary_key=True),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("seen_at_ms", BigInteger, nullable=False),
)

# One row: how the gateways limit now. A hold says under which epoch it was admitted, and is refused
# under another, so that no two ways of counting are ever in use at once.
# mode: "redis", or "local": each gateway counts a share of 1 / num_gateways.
limiter_epochs = Table(
    "limiter_epochs",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("mode", String(8), nullable=False),
    Column("num_gateways", Integer, nullable=False),
    Column("since_ms", BigInteger, nullable=False),
    CheckConstraint("mode IN ('redis', 'local')", name="mode"),
)

# An Idempotency-Key of a tenant at an endpoint, and the answer that it got.
# body_sha256: of the request.   status: None while it runs.   body: of the answer, compressed.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("endpoint", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("status", Integer),
    Column("headers", Text),
    Column("body", LargeBinary),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False, index=True),
)

# Where a tenant wants to hear of things.
webhooks = Table(
    "webhooks",
    metadata,
    Column("tenant_id", String(64), ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("webhook_id", String(32), nullable=False),
    Column("url", String(2048), nullable=False),
    Column("is_enabled", Boolean, nullable=False, server_default=true()),
    Column("created_at_ms", BigInteger, nullable=False),
)

# What they are told, at least once. subject: what it is about; one event of a type for it.
# next_at_ms: of the next try; None when it was delivered or given up.
webhook_events = Table(
    "webhook_events",
    metadata,
    Column("event_id", String(40), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("type", String(64), nullable=False),
    Column("subject", String(128), nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    Column("next_at_ms", BigInteger),
    Column("delivered_at_ms", BigInteger),
    Column("error", Text),
    Index("uq_webhook_events_subject", "tenant_id", "type", "subject", unique=True),
    Index("ix_webhook_events_next", "next_at_ms"),
)
