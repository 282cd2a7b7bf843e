"""The tables of limits, of adapters and by base model, and of gateways that share a Redis.

Times are Unix milliseconds.
"""

from sqlalchemy import BigInteger, CheckConstraint, Column, Integer, String, Table

from registry.tables import metadata

# Limits of an adapter for all its users: its owner and the tenants it is shared with.
# tenant_id: the owner.
adapter_limits = Table(
    "adapter_limits",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("max_concurrency", Integer),
)

# Limits of a tenant on one base model, with and without adapters.   base_model: its name.
base_limits = Table(
    "base_limits",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("base_model", String(256), primary_key=True),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("max_concurrency", Integer),
)

# Gateways of this database. A living one keeps writing seen_at_ms, by the database's clock.
gateways = Table(
    "gateways",
    metadata,
    Column("gateway_id", String(64), primary_key=True),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("seen_at_ms", BigInteger, nullable=False),
)

# One row: the gateways' current way of counting. A hold says under which epoch it was admitted, and
# is refused under another, so that no two ways of counting are ever in use at once.
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
