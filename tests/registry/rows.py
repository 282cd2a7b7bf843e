"""Inserts versions as rows, for tests that need versions but not the way they are published."""

import hashlib
import json

from sqlalchemy import Connection, delete, insert, select

from registry.ref import BaseRef
from registry.tables import adapter_aliases, adapter_versions, adapters


def add_version(
    conn: Connection,
    tenant_id: str = "tenant-a",
    name: str = "pirate",
    version: int = 1,
    *,
    base_revision: str = "b" * 64,
    size_bytes: int = 1000,
    device_bytes: int | None = None,
    adapter_id: str | None = None,
    base: BaseRef | None = None,
) -> str:
    """Insert the rows of a ready version and point `latest` at it; return its adapter_id.

    base: None for the base model "base" of this base_revision, which is its variant, too.
    """
    base = base or BaseRef(base_revision, "base", base_revision)
    adapter_id = adapter_id or f"ad_{_hex(f'{tenant_id}/{name}')[:32]}"
    digest = _hex(f"{adapter_id}@{version}")
    here = {"adapter_id": adapter_id, "tenant_id": tenant_id}
    canary = None if device_bytes is None else {"device_bytes": device_bytes}
    if not conn.execute(select(adapters).filter_by(adapter_id=adapter_id)).first():
        conn.execute(insert(adapters).values(**here, name=name, created_at_ms=0))
    conn.execute(
        insert(adapter_versions).values(
            **here,
            version=version,
            digest=digest,
            object_key=f"tenants/{tenant_id}/{digest}",
            rank=4,
            size_bytes=size_bytes,
            base_revision=base.revision,
            base_model=base.model_id,
            base_variant=base.variant,
            passport=json.dumps({"size_bytes": size_bytes, "canary": canary}),
            state="ready",
            created_at_ms=0,
            created_by_key="key-1",
        )
    )
    conn.execute(delete(adapter_aliases).filter_by(adapter_id=adapter_id, alias="latest"))
    conn.execute(
        insert(adapter_aliases).values(**here, alias="latest", version=version, updated_at_ms=0)
    )
    return adapter_id


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
