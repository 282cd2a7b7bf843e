"""An index by which old holds are found, and sums of a day's residency without a price.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_IS_PAST = sa.text("state = 'posted' AND failed_at_ms IS NULL")
_TIMES = ("started_at_ms", "at_ms", "duration_ms")


def upgrade() -> None:
    where = {"sqlite_where": _IS_PAST, "postgresql_where": _IS_PAST}
    op.create_index("ix_holds_past", "holds", ["resolved_at_ms"], **where)
    op.create_table(
        "residency_sums",
        sa.Column("day", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kept", sa.String(length=640), nullable=False),
        sa.Column("source_id", sa.String(length=160), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _TIMES),
        sa.PrimaryKeyConstraint("day", "kept", name=op.f("pk_residency_sums")),
    )


def downgrade() -> None:
    op.drop_table("residency_sums")
    op.drop_index("ix_holds_past", "holds")
