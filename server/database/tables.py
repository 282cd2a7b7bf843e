"""The table of leases. Times are Unix milliseconds."""

from sqlalchemy import BigInteger, Column, String, Table

from registry.tables import metadata

# The process that holds each lease, and until when.
leases = Table(
    "leases",
    metadata,
    Column("name", String(96), primary_key=True),
    Column("holder", String(64), nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False),
)
