"""The directory: read-only access to a tenant's adapters and the versions that names mean now.

A missing adapter raises NotFound, and so does another tenant's.
"""

from sqlalchemy import Connection, select

from registry.base.base_models import BaseModels
from registry.catalog import adapter_rows, alias_rows
from registry.catalog.adapter_rows import READY, Adapter, Version
from registry.catalog.alias_rows import Move
from registry.catalog.names import (
    adapter_not_found,
    check_alias,
    could_be_in_name,
    invalid_name,
    is_name,
    is_version,
    model_not_found,
    parse_model,
)
from registry.errors import NotFound, shown
from registry.tables import adapter_versions as versions
from registry.tables import adapters


class Directory:
    """Reads adapters. bases: the models served now; versions for other models are not served."""

    def __init__(self, bases: BaseModels) -> None:
        self.bases = bases

    def resolve(
        self, conn: Connection, tenant_id: str, model: str, request_key: str = ""
    ) -> Version:
        """The version that `name`, `name@alias` or `name@3` means now.

        request_key: requests with the same key get the same version of an alias with a canary.
        Raises NotFound, with a code of its own for a version of the tenant that was made for a base
        model that is not served.
        """
        asked = parse_model(model)
        if asked.version is None:
            version = adapter_rows.find_aliased_version(
                conn, tenant_id, asked.name, asked.alias, request_key
            )
        else:
            version = adapter_rows.find_version(conn, tenant_id, asked.name, asked.version)
        if version is None:
            raise model_not_found(model)
        if self.bases.serving(version.base) is None:
            raise self._not_servable(model, version)
        return version

    def list_adapters(
        self,
        conn: Connection,
        tenant_id: str,
        *,
        after: str | None = None,
        search: str = "",
        limit: int = 1000,
    ) -> list[Adapter]:
        """The tenant's adapters whose names contain `search` and come after `after`, by name.

        Raises Invalid if `after` is not a valid name.
        """
        if after and not is_name(after):
            raise invalid_name(after, "after", "the last name of the page before")
        # Only characters of names reach SQL, since databases differ in case and odd characters.
        if not could_be_in_name(search):
            return []
        query = select(adapters).where(
            adapters.c.tenant_id == tenant_id,
            adapters.c.deleted_at_ms.is_(None),
            adapters.c.name > (after or ""),
            adapters.c.name.contains(search, autoescape=True),
        )
        found = conn.execute(query.order_by(adapters.c.name).limit(limit)).all()
        return adapter_rows.with_aliases(conn, tenant_id, found)

    def get_adapter(self, conn: Connection, tenant_id: str, name: str) -> Adapter:
        adapter = adapter_rows.find_adapter(conn, tenant_id, name) if is_name(name) else None
        if adapter is None:
            raise adapter_not_found(name)
        return adapter

    def list_versions(
        self,
        conn: Connection,
        tenant_id: str,
        name: str,
        *,
        before: int | None = None,
        limit: int = 1000,
        include_deleted: bool = False,
    ) -> list[Version]:
        """Versions below the number `before`, newest first."""
        adapter = self.get_adapter(conn, tenant_id, name)
        query = select(versions).where(
            versions.c.adapter_id == adapter.adapter_id, versions.c.tenant_id == tenant_id
        )
        if not include_deleted:
            query = query.where(versions.c.state == READY)
        if before is not None:
            query = query.where(versions.c.version < before)
        query = query.order_by(versions.c.version.desc()).limit(limit)
        return [adapter_rows.to_version(row) for row in conn.execute(query)]

    def get_version(self, conn: Connection, tenant_id: str, name: str, number: int) -> Version:
        """A version that is not deleted, even if it was made for another base model."""
        found = is_name(name) and is_version(number)
        version = adapter_rows.find_version(conn, tenant_id, name, number) if found else None
        if version is None:
            raise adapter_not_found(f"{name}@{number}")
        return version

    def list_moves(
        self,
        conn: Connection,
        tenant_id: str,
        name: str,
        alias: str,
        *,
        before: int | None = None,
        limit: int = 1000,
    ) -> list[Move]:
        """Moves of the alias below the move_id `before`, newest first."""
        check_alias(alias)
        adapter = self.get_adapter(conn, tenant_id, name)
        moves = alias_rows.list_moves(conn, tenant_id, adapter.adapter_id, alias, before, limit)
        if not moves and before is None and alias not in adapter.aliases:
            raise adapter_not_found(f"{name}@{alias}")
        return moves

    def _not_servable(self, model: str, version: Version) -> NotFound:
        """The fault of a version whose base model is not served; it says which ones are alike."""
        alike, served = self.bases.alike(version.base), self.bases.names
        same = f" Its weights are served as {', '.join(alike)}, with another template or precision."
        return NotFound(
            f"Version {version.version} of {shown(model)} was made for the base model "
            f"{version.base_model} that is not served now; those served are: {', '.join(served)}."
            f"{same if alike else ''} Upload one that was trained on one of them, or have this one "
            f"proved there: chorale adapters prove {model.partition('@')[0]} {version.version} "
            f"--base-model {(*alike, *served, 'NAME')[0]}",
            code="model_not_servable",
            param="model",
        )
