"""The table of leases: who does what only one process may do.

Times are Unix milliseconds.
"""

from sqlalchemy import BigInteger, Column, String, Table

from registry.tables import metadata

# Who does what only one process may do, until when.
leases = Table(
    "leases",
    metadata,
    Column("name", String(96), primary_key=True),
    Column("holder", String(64), nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False),
)
