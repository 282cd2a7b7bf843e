"""Holds of traced requests say where in which trace.

Revision ID: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("holds", sa.Column("traceparent", sa.String(length=55)))


def downgrade() -> None:
    op.drop_column("holds", "traceparent")
