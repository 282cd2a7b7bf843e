"""An index of holds that have ended, by which old ones are found and deleted.

Revision ID: 0011
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0008"
branch_labels = None
depends_on = None

_IS_RESOLVED = sa.text("resolved_at_ms IS NOT NULL AND failed_at_ms IS NULL")


def upgrade() -> None:
    op.create_index(
        "ix_holds_resolved",
        "holds",
        ["state", "resolved_at_ms"],
        sqlite_where=_IS_RESOLVED,
        postgresql_where=_IS_RESOLVED,
    )


def downgrade() -> None:
    op.drop_index("ix_holds_resolved", "holds")
