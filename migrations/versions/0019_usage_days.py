"""Sums of usage by day.

Revision ID: 0019
Revises: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_SUMS = (
    "num_requests", "num_failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens",
    "kept_mb_s",
    "cached_amount_nanousd", "completion_amount_nanousd", "amount_nanousd",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "usage_days",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("dimension", sa.String(length=8), nullable=False),
        sa.Column("day_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _SUMS),
        sa.PrimaryKeyConstraint(
            "tenant_id", "dimension", "day_ms", "name", name=op.f("pk_usage_days")
        ),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("usage_days")
