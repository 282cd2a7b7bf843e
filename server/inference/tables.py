"""The tables of routes, and of answers that are kept for requests with an Idempotency-Key.

Times are Unix milliseconds.
"""

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, String, Table, Text

from registry.tables import metadata

# An Idempotency-Key of a tenant at an endpoint, and the answer to its request.
# body_sha256: of the request.   request_id: of its claim until it is stored, then of the request.
# status: None while the request runs.   body: of the answer, compressed.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("endpoint", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_sha256", String(64), nullable=False),
    Column("request_id", String(64), nullable=False, index=True),
    Column("status", Integer),
    Column("headers", Text),
    Column("body", LargeBinary),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False, index=True),
)

# owner: a tenant's id, or "" for the operator's.   models: JSON, a list in the order of the route.
routes = Table(
    "routes",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("strategy", String(16), nullable=False),
    Column("models", Text, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
)
