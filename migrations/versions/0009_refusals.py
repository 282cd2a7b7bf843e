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
    refused = sa.Column("refused_nanousd", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("budgets", refused)


def downgrade() -> None:
    op.drop_column("budgets", "refused_nanousd")
