"""Publishes versions without an upload, for the catalog's tests."""

from pathlib import Path

from sqlalchemy import Connection

from registry.adapter_rows import Version
from registry.base_model import BaseModel
from registry.build import BuiltAdapter, object_key
from registry.catalog import Catalog
from registry.upload_rows import Upload
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
    upload = Upload(
        upload_id="up_1",
        tenant_id=tenant_id,
        adapter_name=name,
        alias=alias,
        state="proving",
        created_by_key="key-1",
        created_at_ms=0,
        expires_at_ms=0,
        files={},
    )
    digest = sha256(content.encode())
    base = next(iter(catalog.bases))
    built = BuiltAdapter(
        upload=upload,
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
    return catalog.publish(conn, name, built, alias)
