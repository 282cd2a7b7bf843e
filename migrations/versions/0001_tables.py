"""All tables, with the one row that they begin with.

Revision ID: 0001
Revises: none
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


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
        sa.Column("event_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer()),
        sa.PrimaryKeyConstraint("event_id", name="pk_adapter_events"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "adapters",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at_ms", sa.BigInteger()),
        sa.PrimaryKeyConstraint("adapter_id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
    )
    op.create_table(
        "audit_log",
        sa.Column("audit_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(128), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(256), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.String(64)),
        sa.PrimaryKeyConstraint("audit_id", name="pk_audit_log"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_log_at_ms", "audit_log", ["at_ms"])
    op.create_index("ix_audit_log_tenant_id", "audit_log", ["tenant_id", "audit_id"])
    op.create_table(
        "adapter_grants",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("grantee_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("granted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("granted_by", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.adapter_id"], name="fk_adapter_grants_adapter_id_adapters"
        ),
        sa.PrimaryKeyConstraint("adapter_id", "grantee_id", name="pk_adapter_grants"),
    )
    op.create_index("ix_adapter_grants_grantee_id", "adapter_grants", ["grantee_id"])
    op.create_table(
        "adapter_offers",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("addressee", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("offered_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("offered_by", sa.String(64), nullable=False),
        sa.Column("is_withdrawn", sa.Boolean(), nullable=False),
        sa.Column("is_declined", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.adapter_id"], name="fk_adapter_offers_adapter_id_adapters"
        ),
        sa.PrimaryKeyConstraint("adapter_id", "addressee", name="pk_adapter_offers"),
    )
    op.create_index("ix_adapter_offers_addressee", "adapter_offers", ["addressee"])
    op.create_index("ix_adapter_offers_offered_at_ms", "adapter_offers", ["offered_at_ms"])
    op.create_index(
        "ix_adapter_offers_tenant_id_offered_at_ms",
        "adapter_offers",
        ["tenant_id", "offered_at_ms"],
    )
    op.create_table(
        "adapter_versions",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
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
        sa.Column("deleted_at_ms", sa.BigInteger()),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.adapter_id"], name="fk_adapter_versions_adapter_id_adapters"
        ),
        sa.PrimaryKeyConstraint("adapter_id", "version", name="pk_adapter_versions"),
    )
    op.create_index("ix_adapter_versions_deleted_at_ms", "adapter_versions", ["deleted_at_ms"])
    op.create_index(
        "ix_adapter_versions_tenant_id_digest", "adapter_versions", ["tenant_id", "digest"]
    )
    op.create_table(
        "alias_moves",
        sa.Column("move_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer()),
        sa.Column("canary_version", sa.Integer()),
        sa.Column("canary_percent", sa.Integer()),
        sa.Column("moved_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("moved_by", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.adapter_id"], name="fk_alias_moves_adapter_id_adapters"
        ),
        sa.PrimaryKeyConstraint("move_id", name="pk_alias_moves"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_alias_moves_adapter_id_alias_move_id", "alias_moves", ["adapter_id", "alias", "move_id"]
    )
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("canary_version", sa.Integer()),
        sa.Column("canary_percent", sa.Integer()),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name="fk_adapter_aliases_adapter_id_version_adapter_versions",
        ),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_adapter_aliases"),
    )
    op.create_table(
        "adapter_pins",
        sa.Column("pin_id", sa.String(64), nullable=False),
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("pinned_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("unpinned_at_ms", sa.BigInteger()),
        sa.Column("pinned_by", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name="fk_adapter_pins_adapter_id_version_adapter_versions",
        ),
        sa.PrimaryKeyConstraint("pin_id", name="pk_adapter_pins"),
    )
    op.create_index(
        "ix_adapter_pins_tenant_id_unpinned_at_ms", "adapter_pins", ["tenant_id", "unpinned_at_ms"]
    )
    op.create_index("ix_adapter_pins_unpinned_at_ms", "adapter_pins", ["unpinned_at_ms"])
    op.create_table(
        "uploads",
        sa.Column("upload_id", sa.String(64), nullable=False),
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
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name="fk_uploads_adapter_id_version_adapter_versions",
        ),
        sa.PrimaryKeyConstraint("upload_id", name="pk_uploads"),
    )
    op.create_index(
        "ix_uploads_discarded_at_ms_expires_at_ms", "uploads", ["discarded_at_ms", "expires_at_ms"]
    )
    op.create_index("ix_uploads_tenant_id_adapter_name", "uploads", ["tenant_id", "adapter_name"])
    op.create_index("ix_uploads_tenant_id_created_at_ms", "uploads", ["tenant_id", "created_at_ms"])
    op.create_index("ix_uploads_tenant_id_state", "uploads", ["tenant_id", "state"])
    op.create_table(
        "upload_files",
        sa.Column("upload_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("received_bytes", sa.BigInteger(), nullable=False),
        sa.Column("multipart_id", sa.Text()),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.upload_id"], name="fk_upload_files_upload_id_uploads"
        ),
        sa.PrimaryKeyConstraint("upload_id", "filename", name="pk_upload_files"),
    )
    op.create_table(
        "upload_parts",
        sa.Column("upload_id", sa.String(64), nullable=False),
        sa.Column("filename", sa.String(64), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("object_key", sa.String(256), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id", "filename"],
            ["upload_files.upload_id", "upload_files.filename"],
            name="fk_upload_parts_upload_id_filename_upload_files",
        ),
        sa.PrimaryKeyConstraint("upload_id", "filename", "start", name="pk_upload_parts"),
    )


def _create_accounts() -> None:
    op.create_table(
        "console_sessions",
        sa.Column("token_sha256", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("key_hmac", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("token_sha256", name="pk_console_sessions"),
    )
    op.create_index("ix_console_sessions_expires_at_ms", "console_sessions", ["expires_at_ms"])
    op.create_index("ix_console_sessions_key_id", "console_sessions", ["key_id"])
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("tokens_per_minute", sa.Integer()),
        sa.Column("max_concurrency", sa.Integer()),
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
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_tenants_status")),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight")),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("hmac", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_by", sa.String(32)),
        sa.Column("replaces", sa.String(32)),
        sa.Column("bucket_id", sa.String(32), nullable=False),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("tokens_per_minute", sa.Integer()),
        sa.Column("max_concurrency", sa.Integer()),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger()),
        sa.Column("revoked_at_ms", sa.BigInteger()),
        sa.Column("last_used_at_ms", sa.BigInteger()),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.tenant_id"], name="fk_api_keys_tenant_id_tenants"
        ),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])


def _create_limits() -> None:
    op.create_table(
        "adapter_limits",
        sa.Column("adapter_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("tokens_per_minute", sa.Integer()),
        sa.Column("max_concurrency", sa.Integer()),
        sa.PrimaryKeyConstraint("adapter_id", name="pk_adapter_limits"),
    )
    op.create_table(
        "base_limits",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("requests_per_minute", sa.Integer()),
        sa.Column("tokens_per_minute", sa.Integer()),
        sa.Column("max_concurrency", sa.Integer()),
        sa.PrimaryKeyConstraint("tenant_id", "base_model", name="pk_base_limits"),
    )


def _create_billing() -> None:
    op.create_table(
        "acknowledgements",
        sa.Column("finding_id", sa.String(16), nullable=False),
        sa.Column("finding", sa.Text(), nullable=False),
        sa.Column("difference_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("entry_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("finding_id", name="pk_acknowledgements"),
    )
    op.create_table(
        "base_revisions",
        sa.Column("base_revision", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("base_revision", name="pk_base_revisions"),
    )
    op.create_table(
        "incidents",
        sa.Column("incident_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("engine_id", sa.String(64)),
        sa.Column("request_id", sa.String(64)),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("incident_id", name="pk_incidents"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_incidents_at_ms", "incidents", ["at_ms"])
    op.create_table(
        "journal_positions",
        sa.Column("engine_id", sa.String(64), nullable=False),
        sa.Column("settled_seq", sa.BigInteger(), nullable=False),
        sa.Column("num_ends", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("engine_id", name="pk_journal_positions"),
    )
    op.create_table(
        "kept_events",
        sa.Column("event_id", sa.BigInteger(), autoincrement=False, nullable=False),
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
        sa.PrimaryKeyConstraint("event_id", name="pk_kept_events"),
        sa.UniqueConstraint("source", "source_id", name="uq_kept_events_source_source_id"),
    )
    op.create_table(
        "ledger_head",
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("last_entry_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_ledger_head"),
    )
    op.create_table(
        "monthly_spend",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "month", name="pk_monthly_spend"),
    )
    op.create_table(
        "price_versions",
        sa.Column("price_version", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("scope", sa.String(16), server_default="default", nullable=False),
        sa.Column("scope_id", sa.String(64), server_default="", nullable=False),
        sa.Column("base_model", sa.String(256), server_default="", nullable=False),
        sa.Column("effective_at_ms", sa.BigInteger(), nullable=False),
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
            name=op.f("ck_price_versions_not_negative"),
        ),
        sa.PrimaryKeyConstraint("price_version", name="pk_price_versions"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_price_versions_effective_at_ms", "price_versions", ["effective_at_ms"])
    op.create_index(
        "ix_price_versions_scope_scope_id_base_model_effective_at_ms",
        "price_versions",
        ["scope", "scope_id", "base_model", "effective_at_ms"],
    )
    op.create_table(
        "residency_sums",
        sa.Column("day", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kept", sa.String(640), nullable=False),
        sa.Column("source_id", sa.String(160), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "kept", name="pk_residency_sums"),
    )
    op.create_table(
        "scheduled_exports",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("interval_s", sa.Integer(), nullable=False),
        sa.Column("exported_seq", sa.BigInteger(), nullable=False),
        sa.Column("next_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.PrimaryKeyConstraint("tenant_id", "format", name="pk_scheduled_exports"),
    )
    op.create_table(
        "signing_keys",
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("public_key", sa.String(64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_signing_keys"),
    )
    op.create_table(
        "statements",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("period", sa.String(7), nullable=False),
        sa.Column("issued_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_entries", sa.BigInteger(), nullable=False),
        sa.Column("total_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("signing_key", sa.String(16), nullable=False),
        sa.Column("signature", sa.String(96), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "period", name="pk_statements"),
    )
    op.create_table(
        "tenant_accounts",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("balance_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("receipt_seq", sa.BigInteger(), nullable=False),
        sa.Column("receipt_sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenant_accounts"),
    )
    op.create_table(
        "usage_days",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("dimension", sa.String(8), nullable=False),
        sa.Column("day_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(256), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("num_failed_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("kept_mb_s", sa.BigInteger(), nullable=False),
        sa.Column("cached_amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("completion_amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "dimension", "day_ms", "name", name="pk_usage_days"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "usage_rollups",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("hour_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("adapter_digest", sa.String(64), nullable=False),
        sa.Column("num_entries", sa.BigInteger(), nullable=False),
        sa.Column("num_failed_requests", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("kept_mb_s", sa.BigInteger(), nullable=False),
        sa.Column("cached_amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("completion_amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "hour_ms",
            "kind",
            "key_id",
            "model",
            "adapter_digest",
            name="pk_usage_rollups",
        ),
    )
    op.create_index("ix_usage_rollups_hour", "usage_rollups", ["hour_ms"])
    op.create_table(
        "budgets",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("enforcement", sa.String(4), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("needed_nanousd", sa.BigInteger(), server_default="1", nullable=False),
        sa.CheckConstraint("enforcement IN ('hard', 'soft')", name=op.f("ck_budgets_enforcement")),
        sa.CheckConstraint("kind IN ('monthly', 'prepaid')", name=op.f("ck_budgets_kind")),
        sa.CheckConstraint("amount_nanousd >= 0", name=op.f("ck_budgets_not_negative")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.tenant_id"], name="fk_budgets_tenant_id_tenants"
        ),
        sa.PrimaryKeyConstraint("tenant_id", "kind", "enforcement", name="pk_budgets"),
    )
    op.create_table(
        "entries",
        sa.Column("entry_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("tenant_name", sa.String(64)),
        sa.Column("debit_account", sa.String(80), nullable=False),
        sa.Column("credit_account", sa.String(80), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("period", sa.String(7), nullable=False),
        sa.Column("price_version", sa.Integer()),
        sa.Column("reverses_entry_id", sa.BigInteger()),
        sa.Column("memo", sa.String(512)),
        sa.Column("idempotency_key", sa.String(128)),
        sa.Column("receipt_seq", sa.BigInteger(), nullable=False),
        sa.Column("prev_sha256", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("signing_key", sa.String(16), nullable=False),
        sa.Column("signature", sa.String(96), nullable=False),
        sa.CheckConstraint("amount_nanousd >= 0", name=op.f("ck_entries_not_negative")),
        sa.ForeignKeyConstraint(
            ["price_version"],
            ["price_versions.price_version"],
            name="fk_entries_price_version_price_versions",
        ),
        sa.PrimaryKeyConstraint("entry_id", name="pk_entries"),
        sa.UniqueConstraint("idempotency_key", name="uq_entries_idempotency_key"),
        sa.UniqueConstraint("reverses_entry_id", name="uq_entries_reverses_entry_id"),
        sa.UniqueConstraint("tenant_id", "receipt_seq", name="uq_entries_tenant_id_receipt_seq"),
    )
    op.create_index("ix_entries_tenant_at", "entries", ["tenant_id", "at_ms", "receipt_seq"])
    op.create_index("ix_entries_tenant_period", "entries", ["tenant_id", "period", "receipt_seq"])
    op.create_table(
        "holds",
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("base_model", sa.String(256), server_default="", nullable=False),
        sa.Column("adapter_id", sa.String(64)),
        sa.Column("adapter_version", sa.Integer()),
        sa.Column("adapter_digest", sa.String(64)),
        sa.Column("price_version", sa.Integer(), nullable=False),
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
        sa.CheckConstraint(
            "(state = 'open') = (resolved_at_ms IS NULL)", name=op.f("ck_holds_resolved")
        ),
        sa.CheckConstraint("state IN ('open', 'posted', 'voided')", name=op.f("ck_holds_state")),
        sa.ForeignKeyConstraint(
            ["price_version"],
            ["price_versions.price_version"],
            name="fk_holds_price_version_price_versions",
        ),
        sa.PrimaryKeyConstraint("request_id", name="pk_holds"),
    )
    op.create_index(
        "ix_holds_cancelled",
        "holds",
        ["cancelled_at_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'open' AND cancelled_at_ms IS NOT NULL"),
        postgresql_where=sa.text("state = 'open' AND cancelled_at_ms IS NOT NULL"),
    )
    op.create_index(
        "ix_holds_open_engine",
        "holds",
        ["engine_id", "expires_at_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_index(
        "ix_holds_open_tenant",
        "holds",
        ["tenant_id"],
        unique=False,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_index(
        "ix_holds_past",
        "holds",
        ["resolved_at_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'posted' AND failed_at_ms IS NULL"),
        postgresql_where=sa.text("state = 'posted' AND failed_at_ms IS NULL"),
    )
    op.create_table(
        "usage_events",
        sa.Column("event_id", _ROW_ID, autoincrement=False, nullable=False),
        sa.Column("engine_id", sa.String(64), nullable=False),
        sa.Column("journal_seq", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger()),
        sa.Column("request_id", sa.String(64), nullable=False),
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
        sa.Column("price_version", sa.Integer()),
        sa.Column("hold_nanousd", sa.BigInteger()),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("first_token_at_ms", sa.BigInteger()),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("load_ms", sa.BigInteger()),
        sa.Column("load_tier", sa.String(8)),
        sa.Column("queue_ms", sa.BigInteger()),
        sa.ForeignKeyConstraint(
            ["price_version"],
            ["price_versions.price_version"],
            name="fk_usage_events_price_version_price_versions",
        ),
        sa.PrimaryKeyConstraint("event_id", name="pk_usage_events"),
        sa.UniqueConstraint(
            "engine_id", "journal_seq", name="uq_usage_events_engine_id_journal_seq"
        ),
        sa.UniqueConstraint("request_id", name="uq_usage_events_request_id"),
    )
    op.execute("INSERT INTO ledger_head (name, last_entry_id) VALUES ('ledger', 0)")


def _create_inference() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("body_sha256", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("headers", sa.Text()),
        sa.Column("body", sa.LargeBinary()),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "endpoint", "key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_expires_at_ms", "idempotency_keys", ["expires_at_ms"])
    op.create_index("ix_idempotency_keys_request_id", "idempotency_keys", ["request_id"])
    op.create_table(
        "routes",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("strategy", sa.String(16), nullable=False),
        sa.Column("models", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "name", name="pk_routes"),
    )


def _create_webhooks() -> None:
    op.create_table(
        "webhook_events",
        sa.Column("event_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(128), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("next_at_ms", sa.BigInteger()),
        sa.Column("delivered_at_ms", sa.BigInteger()),
        sa.Column("error", sa.Text()),
        sa.PrimaryKeyConstraint("event_id", name="pk_webhook_events"),
    )
    op.create_index("ix_webhook_events_next", "webhook_events", ["next_at_ms"])
    op.create_index(
        "uq_webhook_events_subject", "webhook_events", ["tenant_id", "type", "subject"], unique=True
    )
    op.create_table(
        "webhooks",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("webhook_id", sa.String(32), nullable=False),
        sa.Column("url", sa.String(2048), nullable=False),
        sa.Column("is_enabled", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("rests_until_ms", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tried_at_ms", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.tenant_id"], name="fk_webhooks_tenant_id_tenants"
        ),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_webhooks"),
    )


def _create_database() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
