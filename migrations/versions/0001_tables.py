"""All tables, with the one row that they begin with.

Revision ID: 0001
Revises: none
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_SUMS = (
    "num_failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens", "kept_mb_s",
    "cached_amount_nanousd", "completion_amount_nanousd", "amount_nanousd",
)  # fmt: skip
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency")


def upgrade() -> None:
    _create_registry()
    _create_accounts()
    _create_limits()
    _create_billing()
    _create_inference()
    _create_webhooks()
    _create_database()


def _create_registry() -> None:
    op.create_table(
        "adapter_events",
        sa.Column("event_id", _ROW_ID, primary_key=True, autoincrement=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer()),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "adapters",
        sa.Column("adapter_id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at_ms", sa.BigInteger()),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.create_table(
        "audit_log",
        sa.Column("audit_id", _ROW_ID, primary_key=True, autoincrement=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False, index=True),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(256), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.String(64)),
        sa.Index("ix_audit_log_tenant_id", "tenant_id", "audit_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "adapter_grants",
        sa.Column(
            "adapter_id", sa.String(64), sa.ForeignKey("adapters.adapter_id"), primary_key=True
        ),
        sa.Column("grantee_id", sa.String(64), primary_key=True, index=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("granted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("granted_by", sa.String(64), nullable=False),
    )
    op.create_table(
        "adapter_offers",
        sa.Column(
            "adapter_id", sa.String(64), sa.ForeignKey("adapters.adapter_id"), primary_key=True
        ),
        sa.Column("addressee", sa.String(64), primary_key=True, index=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("offered_at_ms", sa.BigInteger(), nullable=False, index=True),
        sa.Column("offered_by", sa.String(64), nullable=False),
        sa.Column("is_withdrawn", sa.Boolean(), nullable=False),
        sa.Column("is_declined", sa.Boolean(), nullable=False),
        sa.Index(None, "tenant_id", "offered_at_ms"),
    )
    op.create_table(
        "adapter_versions",
        sa.Column(
            "adapter_id", sa.String(64), sa.ForeignKey("adapters.adapter_id"), primary_key=True
        ),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("object_key", sa.String(256), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("base_revision", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("base_variant", sa.String(64), nullable=False),
        sa.Column("passport", sa.Text(), nullable=False),
        sa.Column("response_template", sa.Text()),
        sa.Column("tokenizer", sa.Text()),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_by_key", sa.String(64), nullable=False),
        sa.Column("deleted_at_ms", sa.BigInteger(), index=True),
        sa.Index(None, "tenant_id", "digest"),
    )
    op.create_table(
        "alias_moves",
        sa.Column("move_id", _ROW_ID, primary_key=True, autoincrement=True),
        sa.Column(
            "adapter_id", sa.String(64), sa.ForeignKey("adapters.adapter_id"), nullable=False
        ),
        sa.Column("alias", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer()),
        sa.Column("canary_version", sa.Integer()),
        sa.Column("canary_percent", sa.Integer()),
        sa.Column("moved_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("moved_by", sa.String(64), nullable=False),
        sa.Index(None, "adapter_id", "alias", "move_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(64), primary_key=True),
        sa.Column("alias", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("canary_version", sa.Integer()),
        sa.Column("canary_percent", sa.Integer()),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
        ),
    )
    op.create_table(
        "adapter_pins",
        sa.Column("pin_id", sa.String(64), primary_key=True),
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("pinned_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("unpinned_at_ms", sa.BigInteger(), index=True),
        sa.Column("pinned_by", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
        ),
        sa.Index(None, "tenant_id", "unpinned_at_ms"),
    )
    op.create_table(
        "uploads",
        sa.Column("upload_id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("adapter_name", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(64)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_by_key", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("transfer", sa.String(16), server_default="gateway", nullable=False),
        sa.Column("is_dry_run", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("response_template", sa.Text()),
        sa.Column("base_model", sa.String(256)),
        sa.Column("built", sa.Text()),
        sa.Column("proving_until_ms", sa.BigInteger()),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_param", sa.String(256)),
        sa.Column("error", sa.Text()),
        sa.Column("adapter_id", sa.String(64)),
        sa.Column("version", sa.Integer()),
        sa.Column("discarded_at_ms", sa.BigInteger()),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
        ),
        sa.Index(None, "discarded_at_ms", "expires_at_ms"),
        sa.Index(None, "tenant_id", "adapter_name"),
        sa.Index(None, "tenant_id", "created_at_ms"),
        sa.Index(None, "tenant_id", "state"),
    )
    op.create_table(
        "upload_files",
        sa.Column("upload_id", sa.String(64), sa.ForeignKey("uploads.upload_id"), primary_key=True),
        sa.Column("filename", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("received_bytes", sa.BigInteger(), nullable=False),
        sa.Column("multipart_id", sa.Text()),
    )
    op.create_table(
        "upload_parts",
        sa.Column("upload_id", sa.String(64), primary_key=True),
        sa.Column("filename", sa.String(64), primary_key=True),
        sa.Column("start", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("object_key", sa.String(256), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id", "filename"], ["upload_files.upload_id", "upload_files.filename"]
        ),
    )


def _create_accounts() -> None:
    op.create_table(
        "console_sessions",
        sa.Column("token_sha256", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(32), nullable=False, index=True),
        sa.Column("key_hmac", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False, index=True),
    )
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False, unique=True),
        sa.Column("status", sa.String(16), nullable=False),
        *(sa.Column(name, sa.Integer()) for name in _LIMITS),
        sa.Column("max_queue_share", sa.Float()),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("max_adapters", sa.Integer()),
        sa.Column("max_adapter_bytes_total", sa.BigInteger()),
        sa.Column("plan", sa.String(64), server_default="standard", nullable=False),
        sa.Column("ignore_unknown_fields", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("legal_name", sa.String(256)),
        sa.Column("address", sa.String(1024)),
        sa.Column("cache_salt", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("status IN ('active', 'suspended')", name="status"),
        sa.CheckConstraint("weight > 0", name="weight"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(32), primary_key=True),
        sa.Column(
            "tenant_id",
            sa.String(64),
            sa.ForeignKey("tenants.tenant_id"),
            nullable=False,
            index=True,
        ),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("hmac", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_by", sa.String(32)),
        sa.Column("replaces", sa.String(32)),
        sa.Column("bucket_id", sa.String(32), nullable=False),
        *(sa.Column(name, sa.Integer()) for name in _LIMITS),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger()),
        sa.Column("revoked_at_ms", sa.BigInteger()),
        sa.Column("last_used_at_ms", sa.BigInteger()),
    )


def _create_limits() -> None:
    op.create_table(
        "adapter_limits",
        sa.Column("adapter_id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        *(sa.Column(name, sa.Integer()) for name in _LIMITS),
    )
    op.create_table(
        "base_limits",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("base_model", sa.String(256), primary_key=True),
        *(sa.Column(name, sa.Integer()) for name in _LIMITS),
    )


def _create_billing() -> None:
    op.create_table(
        "acknowledgements",
        sa.Column("finding_id", sa.String(16), primary_key=True),
        sa.Column("finding", sa.Text(), nullable=False),
        sa.Column("difference_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("entry_id", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "base_revisions",
        sa.Column("base_revision", sa.String(64), primary_key=True),
        sa.Column("base_model", sa.String(256), nullable=False),
    )
    op.create_table(
        "incidents",
        sa.Column("incident_id", _ROW_ID, primary_key=True, autoincrement=True),
        sa.Column("at_ms", sa.BigInteger(), nullable=False, index=True),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("engine_id", sa.String(64)),
        sa.Column("request_id", sa.String(64)),
        sa.Column("detail", sa.Text(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "journal_positions",
        sa.Column("engine_id", sa.String(64), primary_key=True),
        sa.Column("settled_seq", sa.BigInteger(), nullable=False),
        sa.Column("num_ends", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "kept_events",
        sa.Column("event_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("source_id", sa.String(160), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("adapter_id", sa.String(64)),
        sa.Column("adapter_version", sa.Integer()),
        sa.Column("adapter_digest", sa.String(64), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("slabs", sa.Integer(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("source", "source_id"),
    )
    op.create_table(
        "ledger_head",
        sa.Column("name", sa.String(16), primary_key=True),
        sa.Column("last_entry_id", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "monthly_spend",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("month", sa.String(7), primary_key=True),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "price_versions",
        sa.Column("price_version", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("scope", sa.String(16), server_default="default", nullable=False),
        sa.Column("scope_id", sa.String(64), server_default="", nullable=False),
        sa.Column("base_model", sa.String(256), server_default="", nullable=False),
        sa.Column("effective_at_ms", sa.BigInteger(), nullable=False, index=True),
        sa.Column("until_ms", sa.BigInteger()),
        sa.Column("prompt_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("cached_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("completion_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("storage_nanousd", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("pinned_nanousd", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("resident_nanousd", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "prompt_nanousd >= 0 AND cached_nanousd >= 0 AND completion_nanousd >= 0",
            name="not_negative",
        ),
        sa.Index(None, "scope", "scope_id", "base_model", "effective_at_ms"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "residency_sums",
        sa.Column("day", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kept", sa.String(640), primary_key=True),
        sa.Column("source_id", sa.String(160), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "scheduled_exports",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("format", sa.String(16), primary_key=True),
        sa.Column("interval_s", sa.Integer(), nullable=False),
        sa.Column("exported_seq", sa.BigInteger(), nullable=False),
        sa.Column("next_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text()),
    )
    op.create_table(
        "signing_keys",
        sa.Column("key_id", sa.String(16), primary_key=True),
        sa.Column("public_key", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "statements",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("period", sa.String(7), primary_key=True),
        sa.Column("issued_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_entries", sa.BigInteger(), nullable=False),
        sa.Column("total_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("signing_key", sa.String(16), nullable=False),
        sa.Column("signature", sa.String(96), nullable=False),
    )
    op.create_table(
        "tenant_accounts",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("balance_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("receipt_seq", sa.BigInteger(), nullable=False),
        sa.Column("receipt_sha256", sa.String(64), nullable=False),
    )
    op.create_table(
        "usage_days",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("dimension", sa.String(8), primary_key=True),
        sa.Column("day_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(256), primary_key=True),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _SUMS),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "usage_rollups",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("hour_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("key_id", sa.String(32), primary_key=True),
        sa.Column("model", sa.String(256), primary_key=True),
        sa.Column("adapter_digest", sa.String(64), primary_key=True),
        sa.Column("num_entries", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _SUMS),
        sa.Index("ix_usage_rollups_hour", "hour_ms"),
    )
    op.create_table(
        "budgets",
        sa.Column("tenant_id", sa.String(64), sa.ForeignKey("tenants.tenant_id"), primary_key=True),
        sa.Column("kind", sa.String(8), primary_key=True),
        sa.Column("enforcement", sa.String(4), primary_key=True),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("needed_nanousd", sa.BigInteger(), server_default="1", nullable=False),
        sa.CheckConstraint("enforcement IN ('hard', 'soft')", name="enforcement"),
        sa.CheckConstraint("kind IN ('monthly', 'prepaid')", name="kind"),
        sa.CheckConstraint("amount_nanousd >= 0", name="not_negative"),
    )
    op.create_table(
        "entries",
        sa.Column("entry_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("tenant_name", sa.String(64)),
        sa.Column("debit_account", sa.String(80), nullable=False),
        sa.Column("credit_account", sa.String(80), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("period", sa.String(7), nullable=False),
        sa.Column("price_version", sa.Integer(), sa.ForeignKey("price_versions.price_version")),
        sa.Column("reverses_entry_id", sa.BigInteger(), unique=True),
        sa.Column("memo", sa.String(512)),
        sa.Column("idempotency_key", sa.String(128), unique=True),
        sa.Column("receipt_seq", sa.BigInteger(), nullable=False),
        sa.Column("prev_sha256", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("signing_key", sa.String(16), nullable=False),
        sa.Column("signature", sa.String(96), nullable=False),
        sa.CheckConstraint("amount_nanousd >= 0", name="not_negative"),
        sa.UniqueConstraint("tenant_id", "receipt_seq"),
        sa.Index("ix_entries_tenant_at", "tenant_id", "at_ms", "receipt_seq"),
        sa.Index("ix_entries_tenant_period", "tenant_id", "period", "receipt_seq"),
    )
    op.create_table(
        "holds",
        sa.Column("request_id", sa.String(64), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("base_model", sa.String(256), server_default="", nullable=False),
        sa.Column("adapter_id", sa.String(64)),
        sa.Column("adapter_version", sa.Integer()),
        sa.Column("adapter_digest", sa.String(64)),
        sa.Column(
            "price_version",
            sa.Integer(),
            sa.ForeignKey("price_versions.price_version"),
            nullable=False,
        ),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("token_lease", sa.Integer(), nullable=False),
        sa.Column("engine_id", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("resolved_at_ms", sa.BigInteger()),
        sa.Column("failed_at_ms", sa.BigInteger()),
        sa.Column("cancelled_at_ms", sa.BigInteger()),
        sa.Column("traceparent", sa.String(55)),
        sa.CheckConstraint("(state = 'open') = (resolved_at_ms IS NULL)", name="resolved"),
        sa.CheckConstraint("state IN ('open', 'posted', 'voided')", name="state"),
        sa.Index(
            "ix_holds_cancelled",
            "cancelled_at_ms",
            **_where("state = 'open' AND cancelled_at_ms IS NOT NULL"),
        ),
        sa.Index("ix_holds_open_engine", "engine_id", "expires_at_ms", **_where("state = 'open'")),
        sa.Index("ix_holds_open_tenant", "tenant_id", **_where("state = 'open'")),
        sa.Index(
            "ix_holds_past", "resolved_at_ms", **_where("state = 'posted' AND failed_at_ms IS NULL")
        ),
    )
    op.create_table(
        "usage_events",
        sa.Column("event_id", _ROW_ID, primary_key=True, autoincrement=False),
        sa.Column("engine_id", sa.String(64), nullable=False),
        sa.Column("journal_seq", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger()),
        sa.Column("request_id", sa.String(64), nullable=False, unique=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32)),
        sa.Column("model", sa.String(256)),
        sa.Column("adapter_id", sa.String(64)),
        sa.Column("adapter_version", sa.Integer()),
        sa.Column("adapter_digest", sa.String(64)),
        sa.Column("base_revision", sa.String(64), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("stop_cause", sa.String(32), nullable=False),
        sa.Column("is_failed", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("output_sha256", sa.String(64), nullable=False),
        sa.Column("price_version", sa.Integer(), sa.ForeignKey("price_versions.price_version")),
        sa.Column("hold_nanousd", sa.BigInteger()),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("first_token_at_ms", sa.BigInteger()),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("load_ms", sa.BigInteger()),
        sa.Column("load_tier", sa.String(8)),
        sa.Column("queue_ms", sa.BigInteger()),
        sa.UniqueConstraint("engine_id", "journal_seq"),
    )
    op.execute("INSERT INTO ledger_head (name, last_entry_id) VALUES ('ledger', 0)")


def _create_inference() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.String(64), primary_key=True),
        sa.Column("endpoint", sa.String(64), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False, index=True),
        sa.Column("status", sa.Integer()),
        sa.Column("headers", sa.Text()),
        sa.Column("body", sa.LargeBinary()),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False, index=True),
    )
    op.create_table(
        "routes",
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("strategy", sa.String(16), nullable=False),
        sa.Column("models", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
    )


def _create_webhooks() -> None:
    op.create_table(
        "webhook_events",
        sa.Column("event_id", sa.String(40), primary_key=True),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(128), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("next_at_ms", sa.BigInteger()),
        sa.Column("delivered_at_ms", sa.BigInteger()),
        sa.Column("error", sa.Text()),
        sa.Index("ix_webhook_events_next", "next_at_ms"),
        sa.Index("uq_webhook_events_subject", "tenant_id", "type", "subject", unique=True),
    )
    op.create_table(
        "webhooks",
        sa.Column("tenant_id", sa.String(64), sa.ForeignKey("tenants.tenant_id"), primary_key=True),
        sa.Column("webhook_id", sa.String(32), nullable=False),
        sa.Column("url", sa.String(2048), nullable=False),
        sa.Column("is_enabled", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("rests_until_ms", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tried_at_ms", sa.BigInteger(), server_default="0", nullable=False),
    )


def _create_database() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(96), primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
    )


def _where(condition: str) -> dict[str, sa.TextClause]:
    return {f"{dialect}_where": sa.text(condition) for dialect in ("sqlite", "postgresql")}
