"""A column of roll-ups for the requests that failed through a fault of the server.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("num_failed_requests", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("usage_rollups", column)


def downgrade() -> None:
    op.drop_column("usage_rollups", "num_failed_requests")
