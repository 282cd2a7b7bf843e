"""The registry's tables, on the metadata that every table of the platform joins.

Times are whole milliseconds since the Unix epoch: the same integers on SQLite and PostgreSQL.
Every row carries its tenant, also where a join could find it: no query has to trust a join.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# A deleted adapter keeps its row: its name comes back with the next version number.
adapters = Table(
    "adapters",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("deleted_at_ms", BigInteger),
    UniqueConstraint("tenant_id", "name"),
)

# Immutable but for state ("ready" | "deleted") and deleted_at_ms.
adapter_versions = Table(
    "adapter_versions",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("tenant_id", String(64), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("object_key", String(256), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("base_revision", String(64), nullable=False),
    Column("passport", Text, nullable=False),  # JSON
    Column("state", String(16), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("created_by_key", String(64), nullable=False),
    Column("deleted_at_ms", BigInteger),
    ForeignKeyConstraint(["adapter_id"], ["adapters.adapter_id"]),
    # Finds the version of a digest, and says whether a tenant's object is still in use.
    Index(None, "tenant_id", "digest"),
)

adapter_aliases = Table(
    "adapter_aliases",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("alias", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    ForeignKeyConstraint(
        ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
    ),
)

# state: "open" | "complete" | "failed" | "expired"
uploads = Table(
    "uploads",
    metadata,
    Column("upload_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("adapter_name", String(64), nullable=False),
    Column("alias", String(64)),
    Column("state", String(16), nullable=False),
    Column("created_by_key", String(64), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("expires_at_ms", BigInteger, nullable=False),
    Column("error_code", String(64)),
    Column("error_param", String(256)),
    Column("error", Text),
    Column("adapter_id", String(64)),
    Column("version", Integer),
    # Null while the object store may still hold parts.
    Column("discarded_at_ms", BigInteger),
    ForeignKeyConstraint(
        ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
    ),
    Index(None, "tenant_id", "state"),
    Index(None, "discarded_at_ms", "expires_at_ms"),
)

upload_files = Table(
    "upload_files",
    metadata,
    Column("upload_id", String(64), primary_key=True),
    Column("filename", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("received_bytes", BigInteger, nullable=False),
    ForeignKeyConstraint(["upload_id"], ["uploads.upload_id"]),
)

# Rows live as long as the parts' objects.
upload_parts = Table(
    "upload_parts",
    metadata,
    Column("upload_id", String(64), primary_key=True),
    Column("filename", String(64), primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant_id", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("object_key", String(256), nullable=False),
    ForeignKeyConstraint(
        ["upload_id", "filename"], ["upload_files.upload_id", "upload_files.filename"]
    ),
)
