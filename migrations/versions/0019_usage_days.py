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
_COST_KINDS = "'usage', 'storage', 'pinned', 'resident', 'credit', 'correction'"


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
    num_requests = "CASE WHEN kind = 'usage' THEN num_entries - num_failed_requests ELSE 0 END"
    sums = ", ".join(f"sum({value})" for value in (num_requests, *_SUMS[1:]))
    for dimension, name in (("kind", "kind"), ("key", "key_id"), ("model", "model")):
        kinds = "" if dimension == "kind" else f"WHERE kind IN ({_COST_KINDS})"
        op.execute(
            f"INSERT INTO usage_days (tenant_id, dimension, day_ms, name, {', '.join(_SUMS)}) "
            f"SELECT tenant_id, '{dimension}', hour_ms - hour_ms % 86400000, {name}, {sums} "
            f"FROM usage_rollups {kinds} GROUP BY 1, 3, 4"
        )


def downgrade() -> None:
    op.drop_table("usage_days")
