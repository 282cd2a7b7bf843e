"""Offers of adapters, which tenants accept or decline; the grants that there are stay in force.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_INDEXES = (["addressee"], ["tenant_id", "offered_at_ms"], ["offered_at_ms"])


def upgrade() -> None:
    op.create_table(
        "adapter_offers",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("addressee", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("offered_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("offered_by", sa.String(length=64), nullable=False),
        sa.Column("is_withdrawn", sa.Boolean(), nullable=False),
        sa.Column("is_declined", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"],
            ["adapters.adapter_id"],
            name=op.f("fk_adapter_offers_adapter_id_adapters"),
        ),
        sa.PrimaryKeyConstraint("adapter_id", "addressee", name=op.f("pk_adapter_offers")),
    )
    for columns in _INDEXES:
        op.create_index(op.f(f"ix_adapter_offers_{'_'.join(columns)}"), "adapter_offers", columns)


def downgrade() -> None:
    op.drop_table("adapter_offers")
