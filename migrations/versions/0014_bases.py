"""Prices and limits by base model.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_OLD_INDEX = "ix_price_versions_scope_scope_id_effective_at_ms"
_INDEX = "ix_price_versions_scope_scope_id_base_model_effective_at_ms"


def upgrade() -> None:
    for table in ("price_versions", "holds"):
        op.add_column(
            table, sa.Column("base_model", sa.String(256), nullable=False, server_default="")
        )
    columns = ["scope", "scope_id", "base_model", "effective_at_ms"]
    op.create_index(op.f(_INDEX), "price_versions", columns)
    op.drop_index(op.f(_OLD_INDEX), "price_versions")
    op.create_table(
        "base_revisions",
        sa.Column("base_revision", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("base_revision", name=op.f("pk_base_revisions")),
    )
    op.create_table(
        "base_limits",
        sa.Column("tenant_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(256), nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.Integer(), nullable=True),
        sa.Column("max_concurrency", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", "base_model", name=op.f("pk_base_limits")),
    )


def downgrade() -> None:
    op.drop_table("base_limits")
    op.drop_table("base_revisions")
    # A price for one base model must not become one for all: no plan can have this name.
    op.execute(
        "UPDATE price_versions SET scope = 'plan', scope_id = '(one base model)' "
        "WHERE base_model <> ''"
    )
    op.create_index(op.f(_OLD_INDEX), "price_versions", ["scope", "scope_id", "effective_at_ms"])
    op.drop_index(op.f(_INDEX), "price_versions")
    for table in ("price_versions", "holds"):
        op.drop_column(table, "base_model")
