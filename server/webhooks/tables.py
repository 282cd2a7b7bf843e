"""The tables of webhooks and of the events that are sent to them.

Times are Unix milliseconds.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    true,
)

from registry.tables import metadata

# The URL that a tenant's events are sent to.   num_failures: failed tries in a row.
# rests_until_ms: time before which nothing is sent.   tried_at_ms: end of the last try.
webhooks = Table(
    "webhooks",
    metadata,
    Column("tenant_id", String(64), ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("webhook_id", String(32), nullable=False),
    Column("url", String(2048), nullable=False),
    Column("is_enabled", Boolean, nullable=False, server_default=true()),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("num_failures", Integer, nullable=False, server_default="0"),
    Column("rests_until_ms", BigInteger, nullable=False, server_default="0"),
    Column("tried_at_ms", BigInteger, nullable=False, server_default="0"),
)

# Events, delivered at least once. subject: what an event is about; a tenant has at most one event
# of a type and subject.   next_at_ms: time of the next try; NULL after delivery or giving up.
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
