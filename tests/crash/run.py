"""One run: a plan is carried out on a world, and the records that it left are checked."""

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from engine.wire.endpoint import Endpoint
from registry.base.base_model import BaseModel
from registry.base.base_models import BaseModels
from registry.catalog.catalog import Catalog
from registry.tables import metadata
from server.accounts.admin_key import AdminKey
from server.accounts.keys import create_key
from server.accounts.tenants import create_tenant
from server.assembly import assemble
from server.database.clock import now_ms
from server.database.database import DEFAULT_FILE, Database
from server.launch.prepare import prepare
from server.launch.secrets import load_or_create_secret
from server.pool.control_files import Member, bases_file, members_file
from tests.crash.checks import Books, all_wrong
from tests.crash.children import DEMO, settings_for
from tests.crash.load import Seen, send_all
from tests.crash.nursery import Nursery
from tests.crash.plans import Plan
from tests.crash.world import World
from tests.registry.publishing import publish
from tests.server.bases import demo_entries

_TENANTS = ("acme", "globex")
_LOG_CHARACTERS = 4000


@dataclass
class Result:
    """The result of a run.

    killed_at: failpoints at which processes died.   deaths: processes that died.   wrong:
    violations that were found.

    num_expired: holds that were still open when all was quiet.   events, holds, entries: rows of
    the ledger.   paid: what clients paid in all, less what was given back.
    """

    seed: int
    killed_at: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    num_expired: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    holds: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    paid: int = 0


def furnish(folder: Path) -> None:
    """Make the folder that every run copies: a migrated SQLite database, secrets, settings."""
    settings = settings_for(folder, f"sqlite:///{folder / DEFAULT_FILE}")
    prepare(settings)()
    gateway = assemble(settings, demo_entries(settings), AdminKey("the-operator"))
    gateway.database.migrate()
    gateway.database.close()
    asyncio.run(gateway.bases.default.engines.close())


def run(plan: Plan, furnished: Path, folder: Path, database_url: str | None) -> Result:
    """Carry out a plan. database_url: a PostgreSQL database that this run may empty; None: SQLite.

    Call it in a process of its own, without threads: it forks.
    """
    shutil.copytree(furnished, folder)
    endpoint = Endpoint.of_socket(folder / "engine" / "engine.sock")
    members_file(folder).write([Member("engine", endpoint.address)])
    settings = settings_for(folder, database_url or f"sqlite:///{folder / DEFAULT_FILE}")
    bases_file(folder).write(demo_entries(settings))  # the copied one names another folder
    nursery = Nursery(folder / "log")
    result = Result(plan.seed)
    try:
        database = Database(database_url, data_dir=folder, exclusive=False)
        world = World(
            folder, database, nursery, plan.kills, plan.waits_for_post, plan.has_drafts,
            plan.num_gateways,
        )  # fmt: skip
        try:
            if database_url:
                database.write_sync(_empty)
            asyncio.run(_carry_out(plan, world, result))
        except Exception as error:
            result.wrong.append(f"the run itself failed: {error!r}")
        result.killed_at, result.deaths = world.killed_at(), world.deaths
        database.close()
    finally:
        nursery.close()
    if result.wrong:
        log = folder / "log"
        result.wrong.append(log.read_text()[-_LOG_CHARACTERS:] if log.exists() else "no log")
    return result


async def _carry_out(plan: Plan, world: World, result: Result) -> None:
    api_keys = _make_customers(world)
    async with world.alive():
        timed = [asyncio.create_task(_kill_at(world, *each)) for each in plan.timed]
        result.seen += await send_all(world.sockets, api_keys, plan.asks)
        await asyncio.gather(*timed)
        result.seen += await send_all(world.sockets, api_keys, plan.then)
        result.num_expired = await world.rest()
    books = Books.of(world)
    result.wrong += all_wrong(world, books, result.seen)
    result.events, result.holds, result.entries = books.events, books.holds, books.entries
    result.paid = sum(books.paid(event["request_id"]) for event in books.events)


async def _kill_at(world: World, process: str, at_s: float) -> None:
    await asyncio.sleep(at_s)
    world.kill(process)


def _make_customers(world: World) -> list[str]:
    """Make two tenants, each with an adapter of the same name; return their API keys."""
    base = BaseModel.load(DEMO, "base", world.folder / "cache")
    pepper = load_or_create_secret(world.folder / "secrets" / "pepper")
    api_keys = []

    def make(conn: Connection) -> None:
        for name in _TENANTS:
            tenant_id = create_tenant(conn, name, now_ms=now_ms()).tenant_id
            publish(Catalog(BaseModels(base)), conn, tenant_id, content=name)
            api_keys.append(create_key(conn, tenant_id, "a key", pepper, now_ms=now_ms())[1])

    world.database.write_sync(make)
    return api_keys


def _empty(conn: Connection) -> None:
    for table in reversed(metadata.sorted_tables):
        conn.execute(sa.delete(table))
