"""Publishes versions without an upload, for the catalog's tests."""

from pathlib import Path

from sqlalchemy import Connection

from registry.base.base_model import BaseModel
from registry.catalog.adapter_rows import BuiltAdapter, Version, object_key
from registry.catalog.catalog import Catalog
from tests.registry.factories import sha256

BASE = BaseModel("tiny", Path("tiny"), {}, {}, "b" * 64)


def publish(
    catalog: Catalog,
    conn: Connection,
    tenant_id: str = "tenant-a",
    name: str = "pirate",
    *,
    content: str = "1",
    alias: str | None = None,
    tokenizer: str | None = None,
) -> Version:
    """Publish a version whose digest is that of `content`."""
    digest = sha256(content.encode())
    base = next(iter(catalog.bases))
    built = BuiltAdapter(
        digest=digest,
        object_key=object_key(tenant_id, digest),
        rank=4,
        size_bytes=1000,
        base_revision=base.base_revision,
        base_model=base.model_id,
        base_variant=base.variant,
        passport={"rank": 4},
        tokenizer=tokenizer,
    )
    return catalog.publish(conn, tenant_id, name, built, key_id="key-1", alias=alias)
