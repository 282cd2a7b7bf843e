"""Proofs of uploads, moves of aliases, grants, pins, and prices of storage.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _add_columns()
    op.create_index(
        op.f("ix_uploads_tenant_id_created_at_ms"), "uploads", ["tenant_id", "created_at_ms"]
    )
    op.create_index(
        op.f("ix_uploads_tenant_id_adapter_name"), "uploads", ["tenant_id", "adapter_name"]
    )
    op.create_index(
        op.f("ix_adapter_versions_deleted_at_ms"), "adapter_versions", ["deleted_at_ms"]
    )
    op.create_table(
        "alias_moves",
        sa.Column("move_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("canary_version", sa.Integer(), nullable=True),
        sa.Column("canary_percent", sa.Integer(), nullable=True),
        sa.Column("moved_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("moved_by", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.adapter_id"], name=op.f("fk_alias_moves_adapter_id_adapters")
        ),
        sa.PrimaryKeyConstraint("move_id", name=op.f("pk_alias_moves")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_alias_moves_adapter_id_alias_move_id"),
        "alias_moves",
        ["adapter_id", "alias", "move_id"],
    )
    op.create_table(
        "adapter_grants",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("grantee_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("granted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("granted_by", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"],
            ["adapters.adapter_id"],
            name=op.f("fk_adapter_grants_adapter_id_adapters"),
        ),
        sa.PrimaryKeyConstraint("adapter_id", "grantee_id", name=op.f("pk_adapter_grants")),
    )
    op.create_index(op.f("ix_adapter_grants_grantee_id"), "adapter_grants", ["grantee_id"])
    op.create_table(
        "adapter_pins",
        sa.Column("pin_id", sa.String(length=64), nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("pinned_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("unpinned_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("pinned_by", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.version"],
            name=op.f("fk_adapter_pins_adapter_id_adapter_versions"),
        ),
        sa.PrimaryKeyConstraint("pin_id", name=op.f("pk_adapter_pins")),
    )
    op.create_index(
        op.f("ix_adapter_pins_tenant_id_unpinned_at_ms"),
        "adapter_pins",
        ["tenant_id", "unpinned_at_ms"],
    )
    op.create_index(op.f("ix_adapter_pins_unpinned_at_ms"), "adapter_pins", ["unpinned_at_ms"])
    op.create_table(
        "adapter_events",
        sa.Column("event_id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_adapter_events")),
        sqlite_autoincrement=True,
    )


def _add_columns() -> None:
    # Each column has a default that stays right for rows of older gateways, which do not know it.
    for name in ("canary_version", "canary_percent"):
        op.add_column("adapter_aliases", sa.Column(name, sa.Integer(), nullable=True))
    for name in ("storage_nanousd", "pinned_nanousd"):
        column = sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        op.add_column("price_versions", column)
    op.add_column("upload_files", sa.Column("multipart_id", sa.Text(), nullable=True))
    transfer = sa.Column("transfer", sa.String(length=16), nullable=False, server_default="gateway")
    op.add_column("uploads", transfer)
    is_dry_run = sa.Column("is_dry_run", sa.Boolean(), nullable=False, server_default=sa.false())
    op.add_column("uploads", is_dry_run)
    op.add_column("uploads", sa.Column("built", sa.Text(), nullable=True))
    op.add_column("uploads", sa.Column("proving_until_ms", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for table in ("adapter_events", "adapter_pins", "adapter_grants", "alias_moves"):
        op.drop_table(table)
    op.drop_index(op.f("ix_adapter_versions_deleted_at_ms"), "adapter_versions")
    op.drop_index(op.f("ix_uploads_tenant_id_adapter_name"), "uploads")
    op.drop_index(op.f("ix_uploads_tenant_id_created_at_ms"), "uploads")
    for name in ("proving_until_ms", "built", "is_dry_run", "transfer"):
        op.drop_column("uploads", name)
    op.drop_column("upload_files", "multipart_id")
    for name in ("pinned_nanousd", "storage_nanousd"):
        op.drop_column("price_versions", name)
    for name in ("canary_percent", "canary_version"):
        op.drop_column("adapter_aliases", name)
