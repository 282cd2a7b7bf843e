"""The registry's tables, on the metadata that every table of the platform joins.

Times are whole milliseconds since the Unix epoch: the same integers on SQLite and PostgreSQL.
Every row has its tenant, even where a join could find it, so that no query has to trust a join.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

# SQLite numbers rows only in a column whose type is exactly INTEGER.
RowId = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# A deleted adapter keeps its row, so that a new upload of its name gets the next version number.
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

# Immutable except for state ("ready" | "deleted" | "purged") and deleted_at_ms.
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
    # The name and the variant of the base model that it was proved on.
    Column("base_model", String(256), nullable=False),
    Column("base_variant", String(64), nullable=False),
    Column("passport", Text, nullable=False),  # JSON
    # JSON: the format of the adapter's tool calls, or its name; null for the base model's.
    Column("response_template", Text),
    # JSON: added tokens, chat template and ends of answers of its own; null for the base model's.
    Column("tokenizer", Text),
    Column("state", String(16), nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("created_by_key", String(64), nullable=False),
    Column("deleted_at_ms", BigInteger),
    ForeignKeyConstraint(["adapter_id"], ["adapters.adapter_id"]),
    # This index finds the version of a digest, and whether a tenant's object is still in use.
    Index(None, "tenant_id", "digest"),
    Index(None, "deleted_at_ms"),
)

adapter_aliases = Table(
    "adapter_aliases",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("alias", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    # A second version that gets canary_percent of the requests; null without a canary.
    Column("canary_version", Integer),
    Column("canary_percent", Integer),
    Column("updated_at_ms", BigInteger, nullable=False),
    ForeignKeyConstraint(
        ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
    ),
)

# Every move of an alias, for rollbacks. version: null if the move removed the alias.
alias_moves = Table(
    "alias_moves",
    metadata,
    Column("move_id", RowId, primary_key=True, autoincrement=True),
    Column("adapter_id", String(64), nullable=False),
    Column("alias", String(64), nullable=False),
    Column("tenant_id", String(64), nullable=False),
    Column("version", Integer),
    Column("canary_version", Integer),
    Column("canary_percent", Integer),
    Column("moved_at_ms", BigInteger, nullable=False),
    Column("moved_by", String(64), nullable=False),
    ForeignKeyConstraint(["adapter_id"], ["adapters.adapter_id"]),
    Index(None, "adapter_id", "alias", "move_id"),
    sqlite_autoincrement=True,
)

# tenant_id: the owner.   grantee_id: a tenant that may use the adapter, too.
adapter_grants = Table(
    "adapter_grants",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("grantee_id", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("granted_at_ms", BigInteger, nullable=False),
    Column("granted_by", String(64), nullable=False),
    ForeignKeyConstraint(["adapter_id"], ["adapters.adapter_id"]),
    Index(None, "grantee_id"),
)

# Adapters offered to tenants that have not accepted. tenant_id: the owner.   addressee: the name or
# the id that the owner wrote; there may be no such tenant. A withdrawn or declined offer keeps its
# row until the offer's time is over.
adapter_offers = Table(
    "adapter_offers",
    metadata,
    Column("adapter_id", String(64), primary_key=True),
    Column("addressee", String(64), primary_key=True),
    Column("tenant_id", String(64), nullable=False),
    Column("offered_at_ms", BigInteger, nullable=False),
    Column("offered_by", String(64), nullable=False),
    Column("is_withdrawn", Boolean, nullable=False),
    Column("is_declined", Boolean, nullable=False),
    ForeignKeyConstraint(["adapter_id"], ["adapters.adapter_id"]),
    Index(None, "addressee"),
    # This index counts an owner's offers.
    Index(None, "tenant_id", "offered_at_ms"),
    # This index finds the offers whose time is over.
    Index(None, "offered_at_ms"),
)

# An interval for which a version was kept resident. unpinned_at_ms: null while it still is.
# A pin that follows a moved alias is a new row. size_bytes: bytes on the device.
adapter_pins = Table(
    "adapter_pins",
    metadata,
    Column("pin_id", String(64), primary_key=True),
    Column("adapter_id", String(64), nullable=False),
    Column("version", Integer, nullable=False),
    Column("tenant_id", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("pinned_at_ms", BigInteger, nullable=False),
    Column("unpinned_at_ms", BigInteger),
    Column("pinned_by", String(64), nullable=False),
    ForeignKeyConstraint(
        ["adapter_id", "version"], ["adapter_versions.adapter_id", "adapter_versions.version"]
    ),
    Index(None, "tenant_id", "unpinned_at_ms"),
    Index(None, "unpinned_at_ms"),
)

# Events that gateways pass to their engines; kept for an hour. version: null for all versions.
adapter_events = Table(
    "adapter_events",
    metadata,
    Column("event_id", RowId, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("tenant_id", String(64), nullable=False),
    Column("adapter_id", String(64), nullable=False),
    Column("version", Integer),
    sqlite_autoincrement=True,
)

# state: "open" | "proving" | "complete" | "failed" | "expired" | "cancelled"
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
    # The way of the upload's bytes: "gateway" | "presigned".
    Column("transfer", String(16), nullable=False, server_default="gateway"),
    # A dry run ends with its passport and makes no version.
    Column("is_dry_run", Boolean, nullable=False, server_default=false()),
    # JSON: the format of tool calls that the version is to have, or its name.
    Column("response_template", Text),
    # The name of the base model that the adapter is for; null if it is found from the config.
    Column("base_model", String(256)),
    # JSON of the canonical object and its passport, once the files are checked.
    Column("built", Text),
    # End of the claim of the gateway that alone may have an engine prove the upload.
    Column("proving_until_ms", BigInteger),
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
    Index(None, "tenant_id", "created_at_ms"),
    # This index finds files that were uploaded before.
    Index(None, "tenant_id", "adapter_name"),
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
    # The object store's id of a presigned file's multipart upload.
    Column("multipart_id", Text),
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
    ForeignKeyConstraint(
        ["upload_id", "filename"], ["upload_files.upload_id", "upload_files.filename"]
    ),
)

audit_log = Table(
    "audit_log",
    metadata,
    Column("audit_id", RowId, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False, index=True),
    Column("actor", String(128), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(256), nullable=False),
    Column("detail", Text, nullable=False),
    # The tenant that owns the target; null if no tenant owns it.
    Column("tenant_id", String(64)),
    Index("ix_audit_log_tenant_id", "tenant_id", "audit_id"),
    sqlite_autoincrement=True,
)
