"""The tables of limits, of adapters and by base model."""

from sqlalchemy import Column, Integer, String, Table

from registry.tables import metadata
from server.limits.amounts import LIMITS

# Limits of an adapter for all its users: its owner and the tenants it is shared with.
# tenant_id: the owner.
adapter_limits = Table(
    "adapter_limits",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    *(Column(name, Integer) for name in LIMITS),
)

# Limits of a tenant on one base model, with and without adapters.   base_model: its name.
base_limits = Table(
    "base_limits",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("base_model", String(256), primary_key=True),
    *(Column(name, Integer) for name in LIMITS),
)
