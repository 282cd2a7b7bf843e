"""All tables.

Until the first release this file creates what the code declares, so that a table is declared once.
The first release writes the tables out here; from then on the file never changes.

Revision ID: 0001
Revises: none
"""

from alembic import op

import server.accounts.tables
import server.billing.tables
import server.database.tables
import server.inference.tables
import server.limits.tables
import server.webhooks.tables
from registry.tables import metadata

revision = "0001"
down_revision = None

_DECLARATIONS = (
    server.accounts.tables, server.billing.tables, server.database.tables,
    server.inference.tables, server.limits.tables, server.webhooks.tables,
)  # fmt: skip
"""The modules that add their tables to the registry's `metadata`."""


def upgrade() -> None:
    metadata.create_all(op.get_bind())
