"""Two gateways in front of the same two engines, as on a cluster, with one PostgreSQL ledger."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from server.billing.audit.run import audit
from server.billing.tables import holds, usage_events
from server.database.database import Database
from server.database.tables import leases
from tests.e2e.stack import Stack, Tenant
from tests.e2e.test_engine_pool import Streamed, engines, stream, wait_until_ready

NUM_STREAMS = 20
"""Number of streams at each gateway."""
NUM_TOKENS = 100


class GatewayAlone(Stack):
    """A gateway that uses the engines of another."""

    def __init__(self, data_dir: Path, model: Path, **settings: Any) -> None:
        super().__init__(data_dir, model, **settings)
        self._module = "tests.e2e.serve_gateway"


@dataclass
class World:
    """Two gateways in front of the same engines.

    owner: the stack whose supervisor runs the engines.   guest: the other gateway.
    """

    owner: Stack
    guest: Stack
    database: Database

    def events(self, tenant: Tenant, count: int) -> dict[str, Any]:
        """Return usage events by request id, once no hold of the tenant is open."""
        query = sa.select(usage_events).filter_by(tenant_id=tenant.tenant_id)
        still_open = sa.select(sa.func.count()).where(
            holds.c.tenant_id == tenant.tenant_id, holds.c.state == "open"
        )
        self.owner.wait(lambda: self.read(still_open).scalar_one() == 0)
        events = {row["request_id"]: row for row in self.read(query).mappings()}
        assert len(events) == count
        return events

    def read(self, query: Any) -> Any:
        return self.database.read_sync(lambda conn: conn.execute(query).freeze())()

    def check_bill(self) -> None:
        folders = [self.owner.data_dir / name for name in engines(self.owner)]
        report = self.database.read_sync(lambda conn: audit(conn, engine_dirs=folders))
        assert (report.findings, report.incidents) == ([], {})


@pytest.fixture(scope="module")
def world(make_postgres, tiny_model: Path, tmp_path_factory) -> Iterator[World]:
    folder, url = tmp_path_factory.mktemp("shared"), make_postgres("template1")
    given = {
        "CHORALE_PEPPER": secrets.token_hex(32),
        "CHORALE_RECEIPT_SIGNING_KEY": secrets.token_hex(32),
        "FAKE_STEP_S": "0.05",
    }
    shared = {
        "database_url": url, "storage": (folder / "objects").as_uri(), "max_model_len": 512,
    }  # fmt: skip
    owner = Stack(folder / "owner", tiny_model, fake_engine=True, engines=2, **shared)
    guest = GatewayAlone(folder / "guest", tiny_model, **shared)
    database = Database(url, data_dir=folder)
    try:
        owner.start(**given)
        wait_until_ready(owner, 2)
        guest.start(**given, ENGINES_OF=str(owner.data_dir))
        wait_until_ready(guest, 2)
        yield World(owner, guest, database)
    finally:
        guest.stop()
        owner.stop()
        database.close()


async def run(world: World, tenant: Tenant, kill_guest: bool = False) -> tuple[list, list]:
    """Run streams at both gateways at once; return those of the owner, and those of the guest."""
    headers = {"authorization": f"Bearer {tenant.api_key}"}
    limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
    got = [[Streamed() for _ in range(NUM_STREAMS)] for _ in range(2)]
    async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as client:
        tasks = [
            asyncio.create_task(stream(_At(client, stack), number, NUM_TOKENS, one))
            for stack, ones in zip((world.owner, world.guest), got, strict=True)
            for number, one in enumerate(ones)
        ]
        if kill_guest:
            while not all(one.num_tokens for ones in got for one in ones):
                await asyncio.sleep(0.02)
            await asyncio.to_thread(world.guest.kill, "gateway")
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [end for end in ends[:NUM_STREAMS] if end]
    assert all(isinstance(end, httpx.TransportError) for end in ends[NUM_STREAMS:]) == kill_guest
    return got[0], got[1]


@dataclass
class _At:
    """A client that sends its paths to one gateway."""

    client: httpx.AsyncClient
    stack: Stack

    def stream(self, method: str, path: str, **options: Any) -> Any:
        return self.client.stream(method, self.stack.base_url + path, **options)


def test_both_gateways_use_both_engines_and_each_journal_is_settled_once(world: World) -> None:
    tenant = world.owner.tenant("acme")
    streams = [one for ones in asyncio.run(run(world, tenant)) for one in ones]
    assert {one.num_tokens for one in streams} == {NUM_TOKENS}
    events = world.events(tenant, 2 * NUM_STREAMS)
    assert {events[one.request_id]["completion_tokens"] for one in streams} == {NUM_TOKENS}
    by_engine = Counter(event["engine_id"] for event in events.values())
    assert len(by_engine) == 2
    assert min(by_engine.values()) >= NUM_STREAMS / 2
    settlers = world.read(sa.select(leases.c.name).where(leases.c.name.like("settler/%")))
    assert sorted(settlers.scalars()) == sorted(f"settler/{engine_id}" for engine_id in by_engine)
    world.check_bill()


def test_who_asks_at_one_gateway_can_cancel_at_the_other(world: World) -> None:
    tenant = world.owner.tenant("cancels")

    async def cancel() -> Streamed:
        got = Streamed()
        headers = {"authorization": f"Bearer {tenant.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            asked = asyncio.create_task(stream(_At(client, world.owner), 1, 400, got))
            while not got.num_tokens:
                await asyncio.sleep(0.01)
            url = f"{world.guest.base_url}/v1/chat/completions/{got.request_id}/cancel"
            assert (await client.post(url)).status_code == 200
            await asked
        return got

    got = asyncio.run(cancel())
    assert 0 < got.num_tokens < 400
    (event,) = world.events(tenant, 1).values()
    assert event["stop_cause"] == "aborted"
    assert event["completion_tokens"] >= got.num_tokens


def test_a_killed_gateways_requests_end_and_the_others_go_on(world: World) -> None:
    tenant = world.owner.tenant("survives")
    kept, lost = asyncio.run(run(world, tenant, kill_guest=True))
    assert {one.num_tokens for one in kept} == {NUM_TOKENS}
    events = world.events(tenant, 2 * NUM_STREAMS)
    for one in kept:
        assert events[one.request_id]["completion_tokens"] == NUM_TOKENS
    for one in lost:
        event = events[one.request_id]
        assert event["completion_tokens"] >= one.num_tokens
        assert event["stop_cause"] in ("gateway_lost", "max_tokens")
    world.guest.wait_ready()
    wait_until_ready(world.guest, 2)
    assert {one.num_tokens for ones in asyncio.run(run(world, tenant)) for one in ones} == {100}
    world.events(tenant, 4 * NUM_STREAMS)
    world.check_bill()
