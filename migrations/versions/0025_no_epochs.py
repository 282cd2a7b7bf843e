"""Gateways no longer agree in the database on how they count limits.

Revision ID: 0025
Revises: 0024
"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("limiter_epochs")
    op.drop_table("gateways")


def downgrade() -> None:
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.String(length=64), primary_key=True),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("seen_at_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "limiter_epochs",
        sa.Column("name", sa.String(length=16), primary_key=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=False),
        sa.Column("num_gateways", sa.Integer(), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("mode IN ('redis', 'local')", name="mode"),
    )
