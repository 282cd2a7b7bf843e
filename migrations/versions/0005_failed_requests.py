"""A column of roll-ups for the requests that failed through a fault of the server.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("num_failed_requests", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("usage_rollups", column)
    op.execute(
        "UPDATE usage_rollups SET num_failed_requests = failed.number FROM ("
        "SELECT entries.tenant_id, at_ms - at_ms % 3600000 AS hour_ms, "
        "coalesce(key_id, '') AS key_id, coalesce(model, '') AS model, "
        "coalesce(adapter_digest, '') AS adapter_digest, count(*) AS number "
        "FROM usage_events JOIN entries ON entry_id = event_id "
        "WHERE is_failed AND kind = 'usage' GROUP BY 1, 2, 3, 4, 5) AS failed "
        "WHERE usage_rollups.kind = 'usage' "
        "AND usage_rollups.tenant_id = failed.tenant_id "
        "AND usage_rollups.hour_ms = failed.hour_ms "
        "AND usage_rollups.key_id = failed.key_id "
        "AND usage_rollups.model = failed.model "
        "AND usage_rollups.adapter_digest = failed.adapter_digest"
    )


def downgrade() -> None:
    op.drop_column("usage_rollups", "num_failed_requests")
