"""An index by which the keys of requests are found that a dead gateway left.

Revision ID: 0012
Revises: 0011
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_INDEX = "ix_idempotency_keys_request_id"


def upgrade() -> None:
    op.create_index(_INDEX, "idempotency_keys", ["request_id"])


def downgrade() -> None:
    op.drop_index(_INDEX, "idempotency_keys")
