"""Columns for what a request waited for in the engine.

Revision ID: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("load_ms", sa.BigInteger()))
    op.add_column("usage_events", sa.Column("load_tier", sa.String(8)))
    op.add_column("usage_events", sa.Column("queue_ms", sa.BigInteger()))


def downgrade() -> None:
    with op.batch_alter_table("usage_events") as batch:
        for name in ("queue_ms", "load_tier", "load_ms"):
            batch.drop_column(name)
