"""Versions say by name and variant on which base model they were proved.

Revision ID: 0021
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("base_model", sa.String(256)))
    op.add_column("adapter_versions", sa.Column("base_variant", sa.String(64)))


def downgrade() -> None:
    with op.batch_alter_table("adapter_versions") as batch:
        batch.drop_column("base_variant")
        batch.drop_column("base_model")
