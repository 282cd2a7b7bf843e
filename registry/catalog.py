"""The catalog: a tenant's names, the versions under them, and what each name means now.

Methods take the caller's connection inside the caller's transaction and never commit.
"""

import secrets
import time
from collections.abc import Callable

from sqlalchemy import Connection

from registry import adapter_rows
from registry.adapter_rows import LATEST, Adapter, Version
from registry.base_model import BaseModel
from registry.build import BuiltAdapter
from registry.errors import AdapterNotFound, AdapterNotServable
from registry.names import check_alias, is_name, parse_model
from registry.ref import AdapterRef


class Catalog:
    """base: what is served now; versions for another base are kept and not served."""

    def __init__(self, base: BaseModel, clock: Callable[[], float] = time.time) -> None:
        self.base = base
        self._clock = clock

    def resolve(self, conn: Connection, tenant_id: str, model: str) -> AdapterRef:
        """The version that `name`, `name@alias` or `name@3` means now.

        Raises AdapterNotFound, also for another tenant's adapter, and AdapterNotServable for the
        tenant's own version that was made for another base model.
        """
        asked = parse_model(model)
        version = adapter_rows.find_version(
            conn, tenant_id, asked.name, alias=asked.alias, number=asked.version
        )
        if version is None:
            raise AdapterNotFound(model=model)
        if not self.is_servable(version):
            raise AdapterNotServable(model=model, version=version.version)
        return version.ref

    def is_servable(self, version: Version) -> bool:
        return version.base_revision == self.base.base_revision

    def list_adapters(
        self, conn: Connection, tenant_id: str, *, after: str | None = None, limit: int = 1000
    ) -> list[Adapter]:
        """The tenant's adapters by name, those after the name `after`."""
        return adapter_rows.list_adapters(conn, tenant_id, after, limit)

    def get_adapter(self, conn: Connection, tenant_id: str, name: str) -> Adapter:
        """Raises AdapterNotFound."""
        adapter = adapter_rows.find_adapter(conn, tenant_id, name) if is_name(name) else None
        if adapter is None:
            raise AdapterNotFound(model=name)
        return adapter

    def list_versions(
        self,
        conn: Connection,
        tenant_id: str,
        name: str,
        *,
        before: int | None = None,
        limit: int = 1000,
    ) -> list[Version]:
        """Newest first, those below the number `before`. Raises AdapterNotFound."""
        adapter = self.get_adapter(conn, tenant_id, name)
        return adapter_rows.list_versions(conn, tenant_id, adapter.adapter_id, before, limit)

    def set_alias(
        self, conn: Connection, tenant_id: str, name: str, alias: str, version: int
    ) -> Adapter:
        """Point an alias at a version, `latest` too: that is a rollback. Raises AdapterNotFound."""
        check_alias(alias)
        adapter_rows.lock_tenant(conn, tenant_id)
        adapter = self.get_adapter(conn, tenant_id, name)
        asked = parse_model(f"{name}@{version}")
        if not adapter_rows.find_version(
            conn, tenant_id, name, alias=asked.alias, number=asked.version
        ):
            raise AdapterNotFound(model=f"{name}@{version}")
        now_ms = self._now_ms()
        adapter_rows.move_alias(conn, tenant_id, adapter.adapter_id, alias, version, now_ms)
        return self.get_adapter(conn, tenant_id, name)

    def delete_adapter(self, conn: Connection, tenant_id: str, name: str) -> None:
        """Take the name and its versions away; objects stay. Raises AdapterNotFound.

        A later upload of the name goes on with the next version number.
        """
        adapter_rows.lock_tenant(conn, tenant_id)
        adapter = self.get_adapter(conn, tenant_id, name)
        adapter_rows.mark_deleted(conn, tenant_id, adapter.adapter_id, self._now_ms())

    def publish(
        self, conn: Connection, name: str, built: BuiltAdapter, alias: str | None = None
    ) -> Version:
        """Make a stored object the next version of `name`, and `latest` and the alias mean it.

        The same bytes as a version that the adapter has are that version.
        """
        tenant_id = built.upload.tenant_id
        adapter_rows.lock_tenant(conn, tenant_id)
        now_ms = self._now_ms()
        new_adapter_id = f"ad_{secrets.token_hex(16)}"
        adapter_id = adapter_rows.open_adapter(
            conn, tenant_id, name, new_adapter_id=new_adapter_id, now_ms=now_ms
        )
        version = adapter_rows.find_same_version(
            conn, tenant_id, adapter_id, built.digest, built.base_revision
        )
        if version is None:
            number = adapter_rows.next_version(conn, adapter_id)
            version = built.as_version(adapter_id, number, now_ms)
            adapter_rows.insert_version(conn, tenant_id, version)
        for moved in {LATEST, alias or LATEST}:
            adapter_rows.move_alias(conn, tenant_id, adapter_id, moved, version.version, now_ms)
        return version

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)
