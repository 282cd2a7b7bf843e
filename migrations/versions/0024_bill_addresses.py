"""A tenant has a legal name and an address for its statements.

Revision ID: 0024
Revises: 0023
"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tenants", sa.Column("legal_name", sa.String(length=256)))
    op.add_column("tenants", sa.Column("address", sa.String(length=1024)))


def downgrade() -> None:
    op.drop_column("tenants", "address")
    op.drop_column("tenants", "legal_name")
