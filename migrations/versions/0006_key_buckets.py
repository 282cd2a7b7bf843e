"""A column of API keys for the buckets in which a key and the keys rotated from it count together.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("bucket_id", sa.String(length=32)))


def downgrade() -> None:
    op.drop_column("api_keys", "bucket_id")
