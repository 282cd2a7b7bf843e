"""A column of budgets for what the smallest refused request needs.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    needed = sa.Column("needed_nanousd", sa.BigInteger(), server_default="1", nullable=False)
    op.add_column("budgets", needed)


def downgrade() -> None:
    op.drop_column("budgets", "needed_nanousd")
