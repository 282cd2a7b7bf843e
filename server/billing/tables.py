"""The tables of money: prices, holds, events, entries, and the tables that are kept beside them.

They name tenants, keys and adapters without foreign keys, since a bill outlives them. Times are
Unix milliseconds, money is integer nano-dollars.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    literal_column,
)

from registry.tables import RowId, metadata

# Rows are never updated: another price is another version. prompt, cached, completion: price of a
# token.   storage, pinned, resident: price of a GB for an hour. A version is in effect from
# effective_at_ms until a later one of its scope is, or until until_ms.
price_versions = Table(
    "price_versions",
    metadata,
    Column("price_version", Integer, primary_key=True, autoincrement=True),
    # "default" | "plan" | "tenant" | "adapter"; scope_id: the plan's name, tenant_id, adapter_id.
    Column("scope", String(16), nullable=False, server_default="default"),
    Column("scope_id", String(64), nullable=False, server_default=""),
    # The name of the only base model that the price is for; "" for any, and for an adapter.
    Column("base_model", String(256), nullable=False, server_default=""),
    Column("effective_at_ms", BigInteger, nullable=False, index=True),
    Column("until_ms", BigInteger),
    Column("prompt_nanousd", BigInteger, nullable=False),
    Column("cached_nanousd", BigInteger, nullable=False),
    Column("completion_nanousd", BigInteger, nullable=False),
    Column("storage_nanousd", BigInteger, nullable=False, server_default="0"),
    Column("pinned_nanousd", BigInteger, nullable=False, server_default="0"),
    Column("resident_nanousd", BigInteger, nullable=False, server_default="0"),
    Column("created_at_ms", BigInteger, nullable=False),
    CheckConstraint(
        "prompt_nanousd >= 0 AND cached_nanousd >= 0 AND completion_nanousd >= 0",
        name="not_negative",
    ),
    Index(None, "scope", "scope_id", "base_model", "effective_at_ms"),
    sqlite_autoincrement=True,
)

# The name under which gateways last served the base model of a revision, or of a variant.
base_revisions = Table(
    "base_revisions",
    metadata,
    Column("base_revision", String(64), primary_key=True),
    Column("base_model", String(256), nullable=False),
)

# Reserved costs of requests. model: the name in the request.   base_model: name of the base model
# that serves it.   token_lease: completion tokens that the amount covers.
holds = Table(
    "holds",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("model", String(256), nullable=False),
    Column("base_model", String(256), nullable=False, server_default=""),
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
    # When the gateway answered with a server error: the request is counted and rated 0.
    Column("failed_at_ms", BigInteger),
    # When the tenant asked to cancel it, possibly at a gateway that does not serve the request.
    Column("cancelled_at_ms", BigInteger),
    # The request's place in its trace, for the span of its settlement, which any gateway may do.
    Column("traceparent", String(55)),
    CheckConstraint("state IN ('open', 'posted', 'voided')", name="state"),
    CheckConstraint("(state = 'open') = (resolved_at_ms IS NULL)", name="resolved"),
)
IS_OPEN = holds.c.state == literal_column("'open'")
IS_CANCELLED = IS_OPEN & holds.c.cancelled_at_ms.is_not(None)
IS_PAST_HOLD = (holds.c.state == literal_column("'posted'")) & holds.c.failed_at_ms.is_(None)
"""Conditions of holds: open; open and cancelled; posted without a note of a failure.

The states are literals, as in the indexes: planners do not match a parameter to a partial index.
"""
for _name, _columns, _condition in (
    ("open_engine", ("engine_id", "expires_at_ms"), IS_OPEN),
    ("open_tenant", ("tenant_id",), IS_OPEN),
    ("cancelled", ("cancelled_at_ms",), IS_CANCELLED),
    ("past", ("resolved_at_ms",), IS_PAST_HOLD),
):
    Index(
        f"ix_holds_{_name}",
        *(holds.c[column] for column in _columns),
        sqlite_where=_condition,
        postgresql_where=_condition,
    )

# One row per request that an engine ended. Rows are never updated.
# event_id: number of its entry.   number: the engine's ends are numbered from 1.
# hold_nanousd: the reserved amount.
usage_events = Table(
    "usage_events",
    metadata,
    Column("event_id", RowId, primary_key=True, autoincrement=False),
    Column("engine_id", String(64), nullable=False),
    Column("journal_seq", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
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
    Column("is_failed", Boolean, nullable=False, server_default=false()),
    Column("output_sha256", String(64), nullable=False),
    Column("price_version", Integer, ForeignKey("price_versions.price_version")),
    Column("hold_nanousd", BigInteger),
    Column("amount_nanousd", BigInteger, nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("first_token_at_ms", BigInteger),
    Column("ended_at_ms", BigInteger, nullable=False),
    Column("posted_at_ms", BigInteger, nullable=False),
    Column("load_ms", BigInteger),
    Column("load_tier", String(8)),
    Column("queue_ms", BigInteger),
    UniqueConstraint("engine_id", "journal_seq"),
)

# One row per stretch of time that an adapter was kept somewhere. Rows are never updated.
# source, source_id: origin of the row; unique.   tier: store | device | host | disk.
kept_events = Table(
    "kept_events",
    metadata,
    Column("event_id", BigInteger, primary_key=True, autoincrement=False),
    Column("source", String(64), nullable=False),
    Column("source_id", String(160), nullable=False),
    Column("tenant_id", String(64), nullable=False),
    Column("adapter_id", String(64)),
    Column("adapter_version", Integer),
    Column("adapter_digest", String(64), nullable=False),
    Column("tier", String(16), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("slabs", Integer, nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("duration_ms", BigInteger, nullable=False),
    UniqueConstraint("source", "source_id"),
)

# Residency without a price: its time so far on a UTC day, whose end makes it an entry and deletes
# the row. kept: the fields of the stretches that are the same.   source_id: the first's, marked.
residency_sums = Table(
    "residency_sums",
    metadata,
    Column("day", BigInteger, primary_key=True, autoincrement=False),
    Column("kept", String(640), primary_key=True),
    Column("source_id", String(160), nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("duration_ms", BigInteger, nullable=False),
)

# Transfers of an amount from one account to another. Rows are never updated, never deleted.
# Each is a receipt as well: the receipt_seq-th of its tenant, chained by sha256, signed.
# period: month of the statement that the entry is on, such as "2026-11".
entries = Table(
    "entries",
    metadata,
    Column("entry_id", BigInteger, primary_key=True, autoincrement=False),
    # One of `receipts.receipt.EntryKind`.
    Column("kind", String(16), nullable=False),
    Column("tenant_id", String(64), nullable=False),
    Column("tenant_name", String(64)),
    Column("debit_account", String(80), nullable=False),
    Column("credit_account", String(80), nullable=False),
    Column("amount_nanousd", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("posted_at_ms", BigInteger, nullable=False),
    Column("period", String(7), nullable=False),
    Column("price_version", Integer, ForeignKey("price_versions.price_version")),
    Column("reverses_entry_id", BigInteger, unique=True),
    Column("memo", String(512)),
    Column("idempotency_key", String(128), unique=True),
    Column("receipt_seq", BigInteger, nullable=False),
    Column("prev_sha256", String(64), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("signing_key", String(16), nullable=False),
    Column("signature", String(96), nullable=False),
    CheckConstraint("amount_nanousd >= 0", name="not_negative"),
    UniqueConstraint("tenant_id", "receipt_seq"),
    Index("ix_entries_tenant_at", "tenant_id", "at_ms", "receipt_seq"),
    Index("ix_entries_tenant_period", "tenant_id", "period", "receipt_seq"),
)

# One row; a poster locks it. last_entry_id: number of the last entry, over all tenants.
ledger_head = Table(
    "ledger_head",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("last_entry_id", BigInteger, nullable=False),
)

# Sums over a tenant's entries and the end of its chain, changed in the transactions that post.
# balance_nanousd: credit that is left; a negative balance is owed.
tenant_accounts = Table(
    "tenant_accounts",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("balance_nanousd", BigInteger, nullable=False),
    Column("receipt_seq", BigInteger, nullable=False),
    Column("receipt_sha256", String(64), nullable=False),
)

# What a tenant spent in a UTC month ("2026-11") by its entries' at_ms: the sum over
# `receipts.receipt.SPEND_KINDS`. Rows are changed in the transactions that post.
monthly_spend = Table(
    "monthly_spend",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("month", String(7), primary_key=True),
    Column("amount_nanousd", BigInteger, nullable=False),
)

# Limits on tenants' spending. amount: if kind is "monthly", the most that may be spent in a UTC
# month; if kind is "prepaid", the balance that must remain.   enforcement: "hard" refuses requests
# at the limit, "soft" sends a webhook.   needed_nanousd: what the smallest request
# needs that a hard budget refused, until a request passes while so much remains; 1 if none is.
budgets = Table(
    "budgets",
    metadata,
    Column("tenant_id", String(64), ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("kind", String(8), primary_key=True),
    Column("enforcement", String(4), primary_key=True),
    Column("amount_nanousd", BigInteger, nullable=False),
    Column("needed_nanousd", BigInteger, nullable=False, server_default="1"),
    CheckConstraint("kind IN ('monthly', 'prepaid')", name="kind"),
    CheckConstraint("enforcement IN ('hard', 'soft')", name="enforcement"),
    CheckConstraint("amount_nanousd >= 0", name="not_negative"),
)

USAGE_SUMS = (
    "num_requests", "num_failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens",
    "kept_mb_s", "cached_amount_nanousd", "completion_amount_nanousd", "amount_nanousd",
)  # fmt: skip
"""The sums of usage, by the names that they have in the tables and in every query of usage."""

# Sums over entries by hour and dimensions, changed in the transactions that post. A dimension that
# entries lack is "". amount: a charge is positive.   kept_mb_s: 10^6 bytes for a second.
# num_requests: without failed ones.
usage_rollups = Table(
    "usage_rollups",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("hour_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(16), primary_key=True),
    Column("key_id", String(32), primary_key=True),
    Column("model", String(256), primary_key=True),
    Column("adapter_digest", String(64), primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in USAGE_SUMS),
    Index("ix_usage_rollups_hour", "hour_ms"),
)

# The same sums by day in UTC and by one dimension: "kind", or "key" or "model", which are over
# `receipts.receipt.SPEND_KINDS`. name: a kind, key or model.
usage_days = Table(
    "usage_days",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("dimension", String(8), primary_key=True),
    Column("day_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(256), primary_key=True),
    *(Column(name, BigInteger, nullable=False) for name in USAGE_SUMS),
    # Rows lie in the order of the key, in which sums read them: this halves their time.
    sqlite_with_rowid=False,
)

# One row per closed month of a tenant. document: canonical JSON, signed. Rows are never updated.
statements = Table(
    "statements",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("period", String(7), primary_key=True),
    Column("issued_at_ms", BigInteger, nullable=False),
    Column("num_entries", BigInteger, nullable=False),
    Column("total_nanousd", BigInteger, nullable=False),
    Column("document", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("signing_key", String(16), nullable=False),
    Column("signature", String(96), nullable=False),
)

# Exports to the object store. exported_seq: last receipt of the tenant's chain that is exported.
scheduled_exports = Table(
    "scheduled_exports",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("format", String(16), primary_key=True),
    Column("interval_s", Integer, nullable=False),
    Column("exported_seq", BigInteger, nullable=False),
    Column("next_at_ms", BigInteger, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("error", Text),
)

# Public keys that receipts were signed with, in hex; the private keys are in no database.
signing_keys = Table(
    "signing_keys",
    metadata,
    Column("key_id", String(16), primary_key=True),
    Column("public_key", String(64), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
)

# Findings of the audit that an operator acknowledged. finding: in words, without its figures.
# difference_nanousd: what entry_id books of it; positive if less was charged than used.
acknowledgements = Table(
    "acknowledgements",
    metadata,
    Column("finding_id", String(16), primary_key=True),
    Column("finding", Text, nullable=False),
    Column("difference_nanousd", BigInteger, nullable=False),
    Column("entry_id", BigInteger, nullable=False),
)

journal_positions = Table(
    "journal_positions",
    metadata,
    Column("engine_id", String(64), primary_key=True),
    Column("settled_seq", BigInteger, nullable=False),
    # The journal's totals over its ends up to settled_seq, which the audit compares.
    Column("num_ends", BigInteger, nullable=False, server_default="0"),
    Column("prompt_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("completion_tokens", BigInteger, nullable=False, server_default="0"),
    Column("updated_at_ms", BigInteger, nullable=False),
)

# Things that should not have happened to money, for a person to look at. The gateway deletes none.
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
