"""The catalog: a tenant's adapter names, their versions, and the version that each name means now.

Methods take the caller's connection inside the caller's transaction and never commit. A missing
adapter raises NotFound, and so does another tenant's. actor: written to the audit log.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Literal

from sqlalchemy import Connection, insert

from registry.base.base_models import BaseModels
from registry.catalog import adapter_rows, alias_rows, deleted_rows, grants, offers, pins
from registry.catalog.adapter_rows import (
    DELETED,
    LATEST,
    PURGED,
    READY,
    Adapter,
    BuiltAdapter,
    Version,
)
from registry.catalog.alias_rows import Canary, Target
from registry.catalog.audit import record_audit
from registry.catalog.directory import Directory
from registry.catalog.events import record_event
from registry.catalog.names import (
    adapter_not_found,
    check_alias,
    check_canary,
    invalid_name,
    is_name,
    is_version,
)
from registry.errors import Conflict, QuotaExceeded, shown
from registry.tables import adapters

# Deleted adapters and versions can be restored this long.
RETENTION_S = 7 * 24 * 3600
# Aliases of one adapter; the limit is low because they are listed with their adapter.
MAX_ALIASES = 64
# Versions purged by one call, so that its transaction stays short.
_MAX_PURGED = 100


class Catalog(Directory):
    """A directory with changes. retention_s: how long deleted versions can be restored."""

    def __init__(
        self,
        bases: BaseModels,
        clock: Callable[[], float] = time.time,
        retention_s: int = RETENTION_S,
    ) -> None:
        super().__init__(bases)
        self.retention_s = retention_s
        self._clock = clock

    # ---- aliases ----

    def set_alias(
        self,
        conn: Connection,
        tenant_id: str,
        name: str,
        alias: str,
        version: int,
        canary: Canary | None = None,
        *,
        actor: str = "operator",
    ) -> Adapter:
        """Let an alias, even `latest`, mean a version, with or without a canary.

        Raises NotFound, Invalid, QuotaExceeded.
        """
        check_alias(alias)
        check_canary(version, canary)
        target = Target(version, canary)
        adapter = self._locked(conn, tenant_id, name)
        for number in sorted(target.versions):
            self.get_version(conn, tenant_id, name, number)
        self._move(conn, adapter, alias, target, actor)
        return self.get_adapter(conn, tenant_id, name)

    def roll_back_alias(
        self, conn: Connection, tenant_id: str, name: str, alias: str, *, actor: str = "operator"
    ) -> Adapter:
        """Restore an alias's meaning before its last move; a second call undoes the first.

        Raises NotFound, Invalid, Conflict.
        """
        check_alias(alias)
        adapter = self._locked(conn, tenant_id, name)
        moves = alias_rows.list_moves(conn, tenant_id, adapter.adapter_id, alias, None, limit=2)
        if not moves and alias not in adapter.aliases:
            raise adapter_not_found(f"{name}@{alias}")
        before = moves[1].target if len(moves) == 2 else None
        if before is None:
            message = (
                f"{shown(name)} has no earlier meaning of {alias}; set the alias to a version."
            )
            raise Conflict(message, code="nothing_to_roll_back")
        for number in sorted(before.versions):
            if adapter_rows.find_version(conn, tenant_id, name, number) is None:
                raise Conflict(
                    f"Version {number} of {shown(name)}, which the alias meant before, is deleted; "
                    "restore it, or set the alias to another version.",
                    code="version_deleted",
                )
        self._move(conn, adapter, alias, before, actor)
        return self.get_adapter(conn, tenant_id, name)

    def remove_alias(
        self, conn: Connection, tenant_id: str, name: str, alias: str, *, actor: str = "operator"
    ) -> Adapter:
        """Remove an alias. Raises NotFound; Invalid for `latest`, which cannot go."""
        check_alias(alias)
        if alias == LATEST:
            raise invalid_name(alias, "alias", "another: every adapter keeps it")
        adapter = self._locked(conn, tenant_id, name)
        if alias not in adapter.aliases:
            raise adapter_not_found(f"{name}@{alias}")
        self._move(conn, adapter, alias, None, actor)
        return self.get_adapter(conn, tenant_id, name)

    # ---- versions come and go ----

    def publish(
        self,
        conn: Connection,
        tenant_id: str,
        name: str,
        built: BuiltAdapter,
        *,
        key_id: str,
        response_template: str | None = None,
        alias: str | None = None,
    ) -> Version:
        """Make a stored object the next version of `name`, and move `latest` and the alias to it.

        If the adapter has a version with the same bytes, that version is used. A deleted name is
        revived without its versions and aliases. Raises QuotaExceeded for one alias too many.
        """
        actor = f"key:{key_id}"
        adapter_rows.lock_tenant(conn, tenant_id)
        adapter = self._open_adapter(conn, tenant_id, name, actor)
        version = adapter_rows.find_same_version(conn, tenant_id, name, built, response_template)
        if version is None:
            version = Version(
                **asdict(built),
                adapter_id=adapter.adapter_id,
                version=adapter_rows.next_version(conn, adapter.adapter_id),
                state=READY,
                created_at_ms=self._now_ms(),
                created_by_key=key_id,
                response_template=response_template,
            )
            adapter_rows.insert_version(conn, tenant_id, version)
        for moved in dict.fromkeys((LATEST, alias or LATEST)):
            self._move(conn, adapter, moved, Target(version.version), actor)
        return version

    def delete_adapter(
        self, conn: Connection, tenant_id: str, name: str, *, actor: str = "operator"
    ) -> None:
        """Delete an adapter with its versions and aliases; restore_adapter can undo this.

        The adapter's pin, grants and offers end. A later upload of the name gets the next number.
        """
        adapter = self._locked(conn, tenant_id, name)
        now_ms = self._now_ms()
        pins.follow_latest(conn, adapter, None, now_ms)
        grants.revoke_all(conn, adapter, actor=actor, now_ms=now_ms)
        offers.withdraw_all(conn, adapter)
        deleted_rows.delete_adapter(conn, tenant_id, adapter.adapter_id, now_ms)
        self._record(conn, "removed", adapter, None, actor)

    def restore_adapter(
        self, conn: Connection, tenant_id: str, name: str, *, actor: str = "operator"
    ) -> Adapter:
        """Undo delete_adapter: the versions deleted with the adapter return, and its aliases.

        Raises NotFound, Conflict.
        """
        adapter_rows.lock_tenant(conn, tenant_id)
        adapter = adapter_rows.find_adapter_row(conn, tenant_id, name) if is_name(name) else None
        if adapter is None:
            raise adapter_not_found(name)
        if adapter.deleted_at_ms is None:
            raise _not_deleted(name)
        if not self._is_kept(adapter.deleted_at_ms) or not deleted_rows.restore_adapter(
            conn, tenant_id, adapter.adapter_id, adapter.deleted_at_ms
        ):
            raise _retention_over(name, self.retention_s)
        self._record(conn, "restored", adapter, None, actor)
        return self.get_adapter(conn, tenant_id, name)

    def list_deleted(self, conn: Connection, tenant_id: str, limit: int) -> list[tuple[str, int]]:
        """(name, deleted_at_ms) of adapters that can be restored, the last deleted first."""
        since_ms = self._now_ms() - self.retention_s * 1000
        return deleted_rows.list_deleted(conn, tenant_id, since_ms, limit)

    def delete_version(
        self, conn: Connection, tenant_id: str, name: str, number: int, *, actor: str = "operator"
    ) -> None:
        """Delete one version; restore_version can undo this.

        Raises NotFound; Conflict while an alias means the version.
        """
        adapter = self._locked(conn, tenant_id, name)
        self.get_version(conn, tenant_id, name, number)
        aliases = [alias for alias, meant in adapter.aliases.items() if number in meant.versions]
        if aliases:
            raise Conflict(
                f"Version {number} of {shown(name)} is in use by {', '.join(aliases)}; "
                "move the alias to another version, or delete the adapter.",
                code="version_in_use",
            )
        now_ms = self._now_ms()
        deleted_rows.set_version(conn, tenant_id, adapter.adapter_id, number, DELETED, now_ms)
        self._record(conn, "removed", adapter, number, actor)

    def restore_version(
        self, conn: Connection, tenant_id: str, name: str, number: int, *, actor: str = "operator"
    ) -> Version:
        """Restore one version under its number.

        Raises NotFound, Conflict.
        """
        adapter = self._locked(conn, tenant_id, name)
        what = f"{name}@{number}"
        version = None
        if is_version(number):
            version = adapter_rows.find_version_row(conn, tenant_id, adapter.adapter_id, number)
        if version is None:
            raise adapter_not_found(what)
        if version.deleted_at_ms is None:
            raise _not_deleted(what)
        if version.state == PURGED or not self._is_kept(version.deleted_at_ms):
            raise _retention_over(what, self.retention_s)
        deleted_rows.set_version(conn, tenant_id, adapter.adapter_id, number, READY, None)
        self._record(conn, "restored", adapter, number, actor)
        return replace(version, state=READY, deleted_at_ms=None)

    def purge_deleted(self, conn: Connection) -> int:
        """Purge versions of all tenants that can no longer be restored, so objects can be swept.

        Returns how many versions were purged; if it is the limit of a call, there may be more.
        """
        until_ms = self._now_ms() - self.retention_s * 1000
        return deleted_rows.purge_versions(conn, until_ms, _MAX_PURGED)

    # ---- internals ----

    def _move(
        self, conn: Connection, adapter: Adapter, alias: str, target: Target | None, actor: str
    ) -> None:
        """Change an alias, and record the move; an unchanged target is no move.

        adapter: as it is before the move.   target: None removes the alias. Raises QuotaExceeded.
        """
        tenant_id, adapter_id = adapter.tenant_id, adapter.adapter_id
        before = adapter.aliases.get(alias)
        if target == before:
            return
        if before is None and alias != LATEST and len(adapter.aliases) >= MAX_ALIASES:
            raise QuotaExceeded.of("max_aliases", MAX_ALIASES, "remove one first")
        now_ms = self._now_ms()
        alias_rows.move_alias(conn, tenant_id, adapter_id, alias, target, now_ms, actor)
        for number in sorted(target.versions) if target else [None]:
            record_event(conn, "moved", tenant_id, adapter_id, number, now_ms)
        if alias == LATEST:
            pins.follow_latest(conn, adapter, target.version if target else None, now_ms)
        action = "alias.move" if target else "alias.remove"
        detail = f"{before or 'new'} -> {target or 'removed'}"
        what = f"{tenant_id}/{adapter.name}@{alias}"
        record_audit(conn, tenant_id, action, detail, target=what, at_ms=now_ms, actor=actor)

    def _record(
        self,
        conn: Connection,
        kind: Literal["removed", "restored"],
        adapter: Adapter,
        number: int | None,
        actor: str,
    ) -> None:
        """Record a deletion or restoration, as an event and in the audit log.

        number: the version; None for the adapter with all its versions.
        """
        now_ms = self._now_ms()
        tenant_id, adapter_id = adapter.tenant_id, adapter.adapter_id
        record_event(conn, kind, tenant_id, adapter_id, number, now_ms)
        verb = "delete" if kind == "removed" else "restore"
        what = f"{tenant_id}/{adapter.name}" + (f"@{number}" if number else "")
        action = f"{'version' if number else 'adapter'}.{verb}"
        record_audit(conn, tenant_id, action, target=what, at_ms=now_ms, actor=actor)

    def _open_adapter(self, conn: Connection, tenant_id: str, name: str, actor: str) -> Adapter:
        """The adapter of this name: as it is, revived without its old aliases, or new."""
        adapter = adapter_rows.find_adapter_row(conn, tenant_id, name)
        if adapter is None:
            adapter_id = f"ad_{secrets.token_hex(16)}"
            its = {"adapter_id": adapter_id, "tenant_id": tenant_id, "name": name}
            conn.execute(insert(adapters).values(its | {"created_at_ms": self._now_ms()}))
        elif adapter.deleted_at_ms is not None:
            deleted_rows.set_adapter(conn, tenant_id, adapter.adapter_id, None)
            for alias in adapter.aliases:
                self._move(conn, adapter, alias, None, actor)
        return self.get_adapter(conn, tenant_id, name)

    def _locked(self, conn: Connection, tenant_id: str, name: str) -> Adapter:
        """The adapter, under its tenant's lock."""
        adapter_rows.lock_tenant(conn, tenant_id)
        return self.get_adapter(conn, tenant_id, name)

    def _is_kept(self, deleted_at_ms: int) -> bool:
        return self._now_ms() < deleted_at_ms + self.retention_s * 1000

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _not_deleted(what: str) -> Conflict:
    """The fault of a restoration without a deletion.   what: a name, or a version as name@3."""
    message = (
        f"{shown(what)} is not deleted; "
        "versions deleted on their own are restored one by one, by number."
    )
    return Conflict(message, code="not_deleted")


def _retention_over(what: str, retention_s: int) -> Conflict:
    message = (
        f"{shown(what)} was deleted more than {retention_s} s ago and is not kept any more; "
        "upload it again."
    )
    return Conflict(message, code="retention_over")
