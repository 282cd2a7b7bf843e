"""A gateway's work on adapters, which a process of its own does and SIGKILL ends at a given point.

Boundaries lie before, within and after a transaction, and before and after each write of the store.
"""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from registry import sweep, tables, upload_proof
from registry.alias_rows import Canary, Target
from registry.base_model import BaseModel
from registry.base_models import BaseModels
from registry.catalog import Catalog
from registry.errors import AdapterNotFound, NotFound
from registry.proof import Proof
from registry.storage import LocalStorage
from registry.upload_build import build_upload
from registry.upload_rows import COMPLETE, OPEN, PROVING, Upload
from registry.upload_rules import RegistryLimits
from registry.uploads import Uploads
from registry.work_dir import WorkDir
from server.database.database import Database
from tests.registry.factories import (
    InProcessValidator,
    declare,
    sha256,
    sound_files,
)

TENANT = "tenant-a"
LIMITS = RegistryLimits(part_bytes=2000)
_LONG_AFTERWARDS_S = 2 * 24 * 3600


class Points:
    """Counts boundaries and kills the process at the `kill_at`-th; 0 never kills it."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at = kill_at
        self.count = 0

    def reach(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class PointedStorage(LocalStorage):
    """A folder as store, with a boundary before and after each put and delete."""

    def __init__(self, root: Path, points: Points) -> None:
        super().__init__(root)
        self._points = points

    def put(self, key: str, path: Path) -> None:
        self._points.reach()
        super().put(key, path)
        self._points.reach()

    def delete(self, key: str) -> None:
        self._points.reach()
        super().delete(key)
        self._points.reach()


@dataclass
class World:
    """One gateway on a database and a store."""

    folder: Path
    points: Points
    late_s: float = 0.0

    def __post_init__(self) -> None:
        self.database = Database(data_dir=self.folder)
        storage = PointedStorage(self.folder / "store", self.points)
        self.catalog = Catalog(BaseModels(_BASES[0]), self.clock)
        self.uploads = Uploads(self.catalog, storage, LIMITS, self.clock, WorkDir(self.folder))
        self.uploads.validator = InProcessValidator()  # type: ignore[assignment]
        self.storage = storage

    def clock(self) -> float:
        return time.time() + self.late_s

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        self.points.reach()
        with self.database.begin() as conn:
            yield conn
            self.points.reach()
        self.points.reach()

    def target(self, name: str, alias: str) -> Target | None:
        with self.database.begin() as conn:
            try:
                return self.catalog.get_adapter(conn, TENANT, name).aliases.get(alias)
            except NotFound:
                return None

    def has_version(self, name: str, number: int) -> bool:
        with self.database.begin() as conn:
            try:
                found = self.catalog.list_versions(conn, TENANT, name)
            except NotFound:
                return False
            return number in [version.version for version in found]


@dataclass(frozen=True)
class Step:
    """A step of the script. is_done: whether the world shows that it was done before a kill."""

    name: str
    do: Callable[[World], object]
    is_done: Callable[[World], bool]


def _push(
    name: str, seed: int, alias: str | None = None, verdict: str = "passed"
) -> Callable[[World], None]:
    """A client that remembers its upload: creates it, sends the missing parts, completes it."""

    def do(world: World) -> None:
        files = sound_files(_BASES[0], seed=seed)
        memory = world.folder / f"memory-{name}-{seed}"
        if memory.exists():
            with world.begin() as conn:
                upload = world.uploads.get_upload(conn, TENANT, memory.read_text())
        else:
            with world.begin() as conn:
                upload = world.uploads.create_upload(
                    conn, TENANT, "key-1", name, declare(files), alias
                )
            memory.write_text(upload.upload_id)
        if upload.state == OPEN:
            _send(world, upload, files)
            upload = build_upload(world.uploads, world.begin, TENANT, upload.upload_id)
        if upload.state == PROVING:
            with world.begin() as conn:
                proof = Proof(verdict=verdict, message=verdict)  # type: ignore[arg-type]
                upload = upload_proof.finish_proof(world.uploads, conn, upload, proof, retry_s=1)
            sweep.discard(world.uploads, world.begin, upload)
        assert (upload.state == COMPLETE) == (verdict == "passed"), upload

    return do


def _send(world: World, upload: Upload, files: dict[str, bytes]) -> None:
    part = world.folder / "part"
    for filename, data in files.items():
        at = upload.files[filename].received_bytes
        for start in range(at, len(data), LIMITS.part_bytes):
            raw = data[start : start + LIMITS.part_bytes]
            part.write_bytes(raw)
            world.uploads.put_part(
                world.begin, TENANT, upload.upload_id, filename, start, part, len(raw),
                sha256(raw), len(data),
            )  # fmt: skip


def _in_transaction(method: str, *arguments: Any, **options: Any) -> Callable[[World], None]:
    def do(world: World) -> None:
        with world.begin() as conn:
            getattr(world.catalog, method)(conn, TENANT, *arguments, **options)

    return do


def _means(alias: str, version: int, canary: Canary | None = None) -> Callable[[World], bool]:
    return lambda world: world.target("pirate", alias) == Target(version, canary)


def _was_refused(world: World) -> bool:
    query = select(tables.uploads.c.state).where(tables.uploads.c.error_code == "no_effect")
    with world.database.begin() as conn:
        return conn.execute(query).first() is not None


PROOF_TENANT = Canary(1, 10)
SCRIPT = [
    Step("push 1", _push("pirate", 1, "prod"), lambda w: w.has_version("pirate", 1)),
    Step("push 2", _push("pirate", 2), lambda w: w.has_version("pirate", 2)),
    Step(
        "move",
        _in_transaction("set_alias", "pirate", "prod", 2, PROOF_TENANT),
        _means("prod", 2, PROOF_TENANT),
    ),
    Step("roll back", _in_transaction("roll_back_alias", "pirate", "prod"), _means("prod", 1)),
    Step("push a bad one", _push("pirate", 3, verdict="no_effect"), _was_refused),
    Step("push 3", _push("pirate", 4), lambda w: w.has_version("pirate", 3)),
    Step(
        "delete 2",
        _in_transaction("delete_version", "pirate", 2),
        lambda w: w.has_version("pirate", 3) and not w.has_version("pirate", 2),
    ),
    Step(
        "restore 2",
        _in_transaction("restore_version", "pirate", 2),
        lambda w: w.has_version("pirate", 2),
    ),
    Step(
        "delete",
        _in_transaction("delete_adapter", "pirate"),
        lambda w: not w.has_version("pirate", 1),
    ),
    Step(
        "restore",
        _in_transaction("restore_adapter", "pirate"),
        lambda w: w.has_version("pirate", 1),
    ),
    Step("push it elsewhere", _push("parrot", 1), lambda w: w.has_version("parrot", 1)),
    Step(
        "delete that",
        _in_transaction("delete_adapter", "parrot"),
        lambda w: not w.has_version("parrot", 1),
    ),
]


def run(folder: Path, kill_at: int = 0) -> int:
    """Run the script from its first step that was not acknowledged; return its boundaries.

    SIGKILL ends the process at the kill_at-th boundary.
    """
    world, log = World(folder, Points(kill_at)), folder / "acknowledged"
    done = log.read_text().splitlines() if log.exists() else []
    # The first step that was not acknowledged may have been done before the kill.
    is_unsure = (folder / "killed").exists()
    (folder / "killed").touch()
    for step in SCRIPT[len(done) :]:
        if not (is_unsure and step.is_done(world)):
            step.do(world)
        is_unsure = False
        with log.open("a") as file:
            file.write(f"{step.name}\n")
    world.database.close()
    return world.points.count


def look(folder: Path) -> dict[str, Any]:
    """Return the faults before and after a sweep of everything abandoned, and the final state."""
    world, log = World(folder, Points(0)), folder / "acknowledged"
    done = len(log.read_text().splitlines()) if log.exists() else 0
    wrong = _broken_versions(world)
    last, following = SCRIPT[done - 1], SCRIPT[min(done, len(SCRIPT) - 1)]
    if done and not (last.is_done(world) or following.is_done(world)):
        wrong.append(f"{last.name!r} was acknowledged and is lost")
    world.late_s = _LONG_AFTERWARDS_S
    sweep.sweep_uploads(world.uploads, world.begin)
    sweep.sweep_objects(world.uploads, world.begin)
    wrong += _broken_versions(world)
    state = _state(world)
    world.database.close()
    return {"wrong": wrong, "acknowledged": done, **state}


def _broken_versions(world: World) -> list[str]:
    """Faults of versions that may be served or restored but whose object is missing or differs."""
    versions, wrong = tables.adapter_versions, []
    with world.database.begin() as conn:
        for row in conn.execute(select(versions).where(versions.c.state != "purged")):
            try:
                data = b"".join(world.storage.read(row.object_key))
            except Exception as error:
                wrong.append(f"version {row.version}: {error}")
                continue
            if hashlib.sha256(data).hexdigest() != row.digest or len(data) != row.size_bytes:
                wrong.append(f"version {row.version} has another object")
    return wrong


def _state(world: World) -> dict[str, Any]:
    versions = tables.adapter_versions
    with world.database.begin() as conn:
        found = conn.execute(select(versions).order_by(versions.c.digest, versions.c.version)).all()
        states = conn.execute(select(tables.uploads.c.state)).scalars()
        open_uploads = [state for state in states if state in (OPEN, PROVING)]
        aliases = {}
        for name in ("pirate", "parrot"):
            try:
                meant = world.catalog.get_adapter(conn, TENANT, name).aliases
            except AdapterNotFound:
                continue
            aliases[name] = {alias: str(target) for alias, target in meant.items()}
    return {
        "versions": [[row.digest, row.version, row.state] for row in found],
        "aliases": aliases,
        "open_uploads": open_uploads,
        "orphans": sorted(
            {each.key for each in world.storage.list("")} - {row.object_key for row in found}
        ),
    }


_BASES: list[BaseModel] = []


def use(base: BaseModel) -> None:
    """Serve this base model in this process."""
    _BASES.append(base)
