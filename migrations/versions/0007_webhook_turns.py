"""Columns of webhooks for whose turn it is, and for receivers that fail and rest.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TIMES = ("rests_until_ms", "tried_at_ms")


def upgrade() -> None:
    count = sa.Column("num_failures", sa.Integer(), server_default="0", nullable=False)
    op.add_column("webhooks", count)
    for name in _TIMES:
        time = sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
        op.add_column("webhooks", time)


def downgrade() -> None:
    for name in ("num_failures", *_TIMES):
        op.drop_column("webhooks", name)
