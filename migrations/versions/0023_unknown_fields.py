"""A tenant's requests may have unknown fields left out.

Revision ID: 0023
Revises: 0022
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column(
        "ignore_unknown_fields", sa.Boolean, nullable=False, server_default=sa.false()
    )
    op.add_column("tenants", column)


def downgrade() -> None:
    # Other tables refer to this one, so SQLite may not make it anew.
    op.drop_column("tenants", "ignore_unknown_fields")
