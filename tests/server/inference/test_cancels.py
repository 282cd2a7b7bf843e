"""A running request can be cancelled at any gateway, but only by its own tenant."""

import asyncio
from pathlib import Path

from server.billing.holds import resolve
from server.database.database import Database
from server.inference.attempts import attempt_ids
from server.inference.cancels import note_cancel, noted_cancels
from server.pool.running import RunningRequest
from tests.server.factories import NOW_MS, insert_holds, make_hold, make_price
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import InProcess


def run_here(product: InProcess, request_id: str, tenant_id: str = "ten_1") -> None:
    product.gateway.bases.default.running.add(
        RunningRequest(request_id, tenant_id, num_answers=1, wanted_tokens=9, is_cold=False)
    )


def test_only_an_open_hold_of_its_own_tenant_can_be_cancelled(each_database: Database) -> None:
    price = make_price(each_database)
    insert_holds(each_database, *(make_hold(price, name) for name in ("open", "posted", "others")))
    each_database.write_sync(lambda conn: resolve(conn, ["posted"], "posted", NOW_MS))
    for tenant, request, is_cancelled in (
        ("ten_1", "open", True), ("ten_1", "open", True), ("ten_1", "posted", False),
        ("ten_2", "others", False), ("ten_1", "unknown", False),
    ):  # fmt: skip
        noted = each_database.write_sync(
            lambda conn, t=tenant, r=request: note_cancel(conn, t, [r])
        )
        assert noted == is_cancelled
    assert each_database.read_sync(noted_cancels) == ["open"]
    each_database.write_sync(lambda conn: resolve(conn, ["open"], "posted", NOW_MS))
    assert each_database.read_sync(noted_cancels) == []


def test_a_request_for_a_route_is_noted_with_the_open_holds_of_its_attempts(
    sqlite_database: Database,
) -> None:
    database, price = sqlite_database, make_price(sqlite_database)
    insert_holds(database, *(make_hold(price, name) for name in ("p.1", "p.2", "q.1")))
    database.write_sync(lambda conn: resolve(conn, ["p.1"], "posted", NOW_MS))
    assert database.write_sync(lambda conn: note_cancel(conn, "ten_1", attempt_ids("p")))
    assert database.read_sync(noted_cancels) == ["p.2"]


def test_what_is_cancelled_at_one_gateway_ends_at_the_one_that_runs_it(
    empty_postgres, tmp_path: Path
) -> None:
    url = empty_postgres()
    gateways = []
    for name in ("asked", "runs", "idle"):
        product = InProcess.build(tmp_path / name, url)
        product.use(FakeEngines())
        gateways.append(product)
    asked, runs, idle = gateways
    database = asked.gateway.database
    insert_holds(database, *(make_hold(make_price(database), name) for name in ("r1", "r2")))
    run_here(runs, "r1")
    run_here(runs, "r2")
    run_here(idle, "r3")

    async def run() -> None:
        assert not await asked.gateway.cancels.cancel("ten_2", "r1")
        assert await asked.gateway.cancels.cancel("ten_1", "r1")
        for product in gateways:
            await product.gateway.cancels.look()
        await runs.gateway.cancels.look()

    asyncio.run(run())
    assert (asked.engines.aborted, idle.engines.aborted) == ([], [])
    assert runs.engines.aborted == ["r1", "r1"], "aborted at each look until its hold ends"
    for product in gateways:
        product.close()


def test_a_request_that_runs_here_is_ended_at_once(product: InProcess) -> None:
    run_here(product, "r1")
    assert asyncio.run(product.gateway.cancels.cancel("ten_1", "r1"))
    assert not asyncio.run(product.gateway.cancels.cancel("ten_2", "r1"))
    assert not asyncio.run(product.gateway.cancels.cancel("ten_1", "r2"))
    assert product.engines.aborted == ["r1"]
    asyncio.run(product.gateway.cancels.look())
    assert product.engines.aborted == ["r1", "r1"], "the first abort may have come too early"
