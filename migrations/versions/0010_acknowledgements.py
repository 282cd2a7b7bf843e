"""Acknowledgements of the audit's findings, each with the entry that books its difference.

Revision ID: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "acknowledgements",
        sa.Column("finding_id", sa.String(length=16), nullable=False),
        sa.Column("finding", sa.Text(), nullable=False),
        sa.Column("difference_nanousd", sa.BigInteger(), nullable=False),
        sa.Column("entry_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("finding_id", name=op.f("pk_acknowledgements")),
    )


def downgrade() -> None:
    op.drop_table("acknowledgements")
