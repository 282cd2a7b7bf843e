"""The format of an adapter's tool calls, which belongs to its version.

Revision ID: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_TABLES = ("adapter_versions", "uploads")


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(table, sa.Column("response_template", sa.Text))


def downgrade() -> None:
    for table in _TABLES:
        with op.batch_alter_table(table) as batch:
            batch.drop_column("response_template")
