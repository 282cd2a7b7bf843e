"""Entries with receipts, accounts, roll-ups, statements; kept adapters; prices by scope; leases.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NEW = (
    "leases",
    "signing_keys",
    "scheduled_exports",
    "statements",
    "usage_rollups",
    "tenant_accounts",
    "ledger_head",
    "entries",
    "kept_events",
)


_OLD_INDEXES = {
    "ix_usage_events_ended": ["ended_at_ms", "event_id"],
    "ix_usage_events_tenant": ["tenant_id", "ended_at_ms", "event_id"],
}


def upgrade() -> None:
    _add_columns()
    op.create_index(
        op.f("ix_price_versions_scope_scope_id_effective_at_ms"),
        "price_versions",
        ["scope", "scope_id", "effective_at_ms"],
    )
    _create_kept_events()
    _create_entries()
    _create_sums()
    _create_statements()
    op.create_table(
        "signing_keys",
        sa.Column("key_id", sa.String(length=16), nullable=False),
        sa.Column("public_key", sa.String(length=64), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_signing_keys")),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("holder", sa.String(length=64), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    # Queries of usage by time read entries and roll-ups now.
    for name in _OLD_INDEXES:
        op.drop_index(name, "usage_events")
    op.execute("INSERT INTO ledger_head (name, last_entry_id) VALUES ('ledger', 0)")


def _add_columns() -> None:
    # Each column has a default that stays right for rows of older gateways, which do not know it.
    plan = sa.Column("plan", sa.String(length=64), nullable=False, server_default="standard")
    op.add_column("tenants", plan)
    scope = sa.Column("scope", sa.String(length=16), nullable=False, server_default="default")
    op.add_column("price_versions", scope)
    scope_id = sa.Column("scope_id", sa.String(length=64), nullable=False, server_default="")
    op.add_column("price_versions", scope_id)
    op.add_column("price_versions", sa.Column("until_ms", sa.BigInteger(), nullable=True))
    resident = sa.Column("resident_nanousd", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("price_versions", resident)
    op.add_column("holds", sa.Column("failed_at_ms", sa.BigInteger(), nullable=True))
    op.add_column("usage_events", sa.Column("number", sa.BigInteger(), nullable=True))
    failed = sa.Column("is_failed", sa.Boolean(), nullable=False, server_default=sa.false())
    op.add_column("usage_events", failed)
    op.add_column("usage_events", sa.Column("hold_nanousd", sa.BigInteger(), nullable=True))
    for name in ("num_ends", "prompt_tokens", "cached_tokens", "completion_tokens"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("journal_positions", column)


def _create_kept_events() -> None:
    op.create_table(
        "kept_events",
        sa.Column("event_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("source_id", sa.String(length=160), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=True),
        sa.Column("adapter_version", sa.Integer(), nullable=True),
        sa.Column("adapter_digest", sa.String(length=64), nullable=False),
        sa.Column("tier", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("slabs", sa.Integer(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_kept_events")),
        sa.UniqueConstraint("source", "source_id", name=op.f("uq_kept_events_source_source_id")),
    )


def _create_entries() -> None:
    op.create_table(
        "entries",
        sa.Column("entry_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_name", sa.String(length=64), nullable=True),
        sa.Column("debit_account", sa.String(length=80), nullable=False),
        sa.Column("credit_account", sa.String(length=80), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("period", sa.String(length=7), nullable=False),
        sa.Column("price_version", sa.Integer(), nullable=True),
        sa.Column("reverses_entry_id", sa.BigInteger(), nullable=True),
        sa.Column("memo", sa.String(length=512), nullable=True),
        sa.Column("idempotency_key", sa.String(length=128), nullable=True),
        sa.Column("receipt_seq", sa.BigInteger(), nullable=False),
        sa.Column("prev_sha256", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("signing_key", sa.String(length=16), nullable=False),
        sa.Column("signature", sa.String(length=96), nullable=False),
        sa.CheckConstraint("amount_nanousd >= 0", name=op.f("ck_entries_not_negative")),
        sa.ForeignKeyConstraint(
            ["price_version"],
            ["price_versions.price_version"],
            name=op.f("fk_entries_price_version_price_versions"),
        ),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_entries")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_entries_idempotency_key")),
        sa.UniqueConstraint("reverses_entry_id", name=op.f("uq_entries_reverses_entry_id")),
        sa.UniqueConstraint(
            "tenant_id", "receipt_seq", name=op.f("uq_entries_tenant_id_receipt_seq")
        ),
    )
    op.create_index("ix_entries_tenant_at", "entries", ["tenant_id", "at_ms", "receipt_seq"])
    op.create_index("ix_entries_tenant_period", "entries", ["tenant_id", "period", "receipt_seq"])


def _create_sums() -> None:
    op.create_table(
        "ledger_head",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("last_entry_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_ledger_head")),
    )
    op.create_table(
        "tenant_accounts",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("balance_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("receipt_seq", sa.BigInteger(), nullable=False),
        sa.Column("receipt_sha256", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant_accounts")),
    )
    op.create_table(
        "usage_rollups",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("hour_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("adapter_digest", sa.String(length=64), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in (
                "num_entries",
                "prompt_tokens",
                "cached_tokens",
                "completion_tokens",
                "kept_mb_s",
                "cached_amount_nanousd",
                "completion_amount_nanousd",
                "amount_nanousd",
            )
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "hour_ms",
            "kind",
            "key_id",
            "model",
            "adapter_digest",
            name=op.f("pk_usage_rollups"),
        ),
    )
    op.create_index("ix_usage_rollups_hour", "usage_rollups", ["hour_ms"])


def _create_statements() -> None:
    op.create_table(
        "statements",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("period", sa.String(length=7), nullable=False),
        sa.Column("issued_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_entries", sa.BigInteger(), nullable=False),
        sa.Column("total_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("signing_key", sa.String(length=16), nullable=False),
        sa.Column("signature", sa.String(length=96), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "period", name=op.f("pk_statements")),
    )
    op.create_table(
        "scheduled_exports",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("format", sa.String(length=16), nullable=False),
        sa.Column("interval_s", sa.Integer(), nullable=False),
        sa.Column("exported_seq", sa.BigInteger(), nullable=False),
        sa.Column("next_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", "format", name=op.f("pk_scheduled_exports")),
    )


def downgrade() -> None:
    for table in _NEW:
        op.drop_table(table)
    for name, columns in _OLD_INDEXES.items():
        op.create_index(name, "usage_events", columns)
    for name in ("completion_tokens", "cached_tokens", "prompt_tokens", "num_ends"):
        op.drop_column("journal_positions", name)
    for name in ("hold_nanousd", "is_failed", "number"):
        op.drop_column("usage_events", name)
    op.drop_column("holds", "failed_at_ms")
    op.drop_index(op.f("ix_price_versions_scope_scope_id_effective_at_ms"), "price_versions")
    for name in ("resident_nanousd", "until_ms", "scope_id", "scope"):
        op.drop_column("price_versions", name)
    op.drop_column("tenants", "plan")
