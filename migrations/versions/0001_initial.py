"""All tables of the first release.

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
    op.create_table(
        "adapters",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("adapter_id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_adapters_tenant_id_name")),
    )
    op.create_table(
        "audit_log",
        sa.Column("audit_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=256), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name=op.f("pk_audit_log")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_audit_log_at_ms"), "audit_log", ["at_ms"], unique=False)
    op.create_table(
        "incidents",
        sa.Column("incident_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("engine_id", sa.String(length=64), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("incident_id", name=op.f("pk_incidents")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_incidents_at_ms"), "incidents", ["at_ms"], unique=False)
    op.create_table(
        "journal_positions",
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("settled_seq", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("engine_id", name=op.f("pk_journal_positions")),
    )
    op.create_table(
        "price_versions",
        sa.Column("price_version", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("effective_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("prompt_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("cached_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("completion_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "prompt_nanousd >= 0 AND cached_nanousd >= 0 AND completion_nanousd >= 0",
            name=op.f("ck_price_versions_not_negative"),
        ),
        sa.PrimaryKeyConstraint("price_version", name=op.f("pk_price_versions")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_price_versions_effective_at_ms"),
        "price_versions",
        ["effective_at_ms"],
        unique=False,
    )
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.Integer(), nullable=True),
        sa.Column("max_concurrency", sa.Integer(), nullable=True),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("max_adapters", sa.Integer(), nullable=True),
        sa.Column("max_adapter_bytes_total", sa.BigInteger(), nullable=True),
        sa.Column("cache_salt", sa.String(length=64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_tenants_status")),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("object_key", sa.String(length=256), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("base_revision", sa.String(length=64), nullable=False),
        sa.Column("passport", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_by_key", sa.String(length=64), nullable=False),
        sa.Column("deleted_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["adapter_id"],
            ["adapters.adapter_id"],
            name=op.f("fk_adapter_versions_adapter_id_adapters"),
        ),
        sa.PrimaryKeyConstraint("adapter_id", "version", name=op.f("pk_adapter_versions")),
    )
    op.create_index(
        op.f("ix_adapter_versions_tenant_id_digest"),
        "adapter_versions",
        ["tenant_id", "digest"],
        unique=False,
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("hmac", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=32), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("last_used_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.tenant_id"], name=op.f("fk_api_keys_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_tenant_id"), "api_keys", ["tenant_id"], unique=False)
    op.create_table(
        "holds",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("adapter_digest", sa.String(length=64), nullable=True),
        sa.Column("price_version", sa.Integer(), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("token_lease", sa.Integer(), nullable=False),
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("resolved_at_ms", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(state = 'open') = (resolved_at_ms IS NULL)", name=op.f("ck_holds_resolved")
        ),
        sa.CheckConstraint("state IN ('open', 'posted', 'voided')", name=op.f("ck_holds_state")),
        sa.ForeignKeyConstraint(
            ["price_version"],
            ["price_versions.price_version"],
            name=op.f("fk_holds_price_version_price_versions"),
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_holds")),
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
    op.create_table(
        "usage_events",
        sa.Column("event_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("engine_id", sa.String(length=64), nullable=False),
        sa.Column("journal_seq", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=True),
        sa.Column("model", sa.String(length=256), nullable=True),
        sa.Column("adapter_id", sa.String(length=64), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("adapter_digest", sa.String(length=64), nullable=True),
        sa.Column("base_revision", sa.String(length=64), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=False),
        sa.Column("stop_cause", sa.String(length=32), nullable=False),
        sa.Column("output_sha256", sa.String(length=64), nullable=False),
        sa.Column("price_version", sa.Integer(), nullable=True),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("first_token_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["price_version"],
            ["price_versions.price_version"],
            name=op.f("fk_usage_events_price_version_price_versions"),
        ),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_usage_events")),
        sa.UniqueConstraint(
            "engine_id", "journal_seq", name=op.f("uq_usage_events_engine_id_journal_seq")
        ),
        sa.UniqueConstraint("request_id", name=op.f("uq_usage_events_request_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_usage_events_ended", "usage_events", ["ended_at_ms", "event_id"], unique=False
    )
    op.create_index(
        "ix_usage_events_tenant",
        "usage_events",
        ["tenant_id", "ended_at_ms", "event_id"],
        unique=False,
    )
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name=op.f("fk_adapter_aliases_adapter_id_version_adapter_versions"),
        ),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name=op.f("pk_adapter_aliases")),
    )
    op.create_table(
        "uploads",
        sa.Column("upload_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("adapter_name", sa.String(length=64), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("created_by_key", sa.String(length=64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_param", sa.String(length=256), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("adapter_id", sa.String(length=64), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("discarded_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name=op.f("fk_uploads_adapter_id_version_adapter_versions"),
        ),
        sa.PrimaryKeyConstraint("upload_id", name=op.f("pk_uploads")),
    )
    op.create_index(
        op.f("ix_uploads_discarded_at_ms_expires_at_ms"),
        "uploads",
        ["discarded_at_ms", "expires_at_ms"],
        unique=False,
    )
    op.create_index(
        op.f("ix_uploads_tenant_id_state"), "uploads", ["tenant_id", "state"], unique=False
    )
    op.create_table(
        "upload_files",
        sa.Column("upload_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("received_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"], ["uploads.upload_id"], name=op.f("fk_upload_files_upload_id_uploads")
        ),
        sa.PrimaryKeyConstraint("upload_id", "filename", name=op.f("pk_upload_files")),
    )
    op.create_table(
        "upload_parts",
        sa.Column("upload_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=64), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("object_key", sa.String(length=256), nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id", "filename"],
            ["upload_files.upload_id", "upload_files.filename"],
            name=op.f("fk_upload_parts_upload_id_filename_upload_files"),
        ),
        sa.PrimaryKeyConstraint("upload_id", "filename", "start", name=op.f("pk_upload_parts")),
    )


def downgrade() -> None:
    op.drop_table("upload_parts")
    op.drop_table("upload_files")
    op.drop_table("uploads")
    op.drop_table("adapter_aliases")
    op.drop_table("usage_events")
    op.drop_table("holds")
    op.drop_table("api_keys")
    op.drop_table("adapter_versions")
    op.drop_table("tenants")
    op.drop_table("price_versions")
    op.drop_table("journal_positions")
    op.drop_table("incidents")
    op.drop_table("audit_log")
    op.drop_table("adapters")
