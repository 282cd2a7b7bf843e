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
    op.execute(
        "WITH RECURSIVE line(key_id, first_id) AS ("
        "SELECT key_id, key_id FROM api_keys WHERE replaces IS NULL "
        "UNION ALL SELECT api_keys.key_id, first_id FROM api_keys "
        "JOIN line ON api_keys.replaces = line.key_id) "
        "UPDATE api_keys SET bucket_id = "
        "(SELECT first_id FROM line WHERE line.key_id = api_keys.key_id) "
        "WHERE replaces IS NOT NULL"
    )


def downgrade() -> None:
    op.drop_column("api_keys", "bucket_id")
