"""The base model that an upload names.

Revision ID: 0015
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("uploads", sa.Column("base_model", sa.String(256)))


def downgrade() -> None:
    with op.batch_alter_table("uploads") as batch:
        batch.drop_column("base_model")
