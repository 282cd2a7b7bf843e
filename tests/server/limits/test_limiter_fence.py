"""The row that says how limits are counted, tested on real databases."""

import asyncio
import threading

import pytest
import sqlalchemy as sa

from server.billing.holds import open_requests
from server.database.database import Database
from server.limits.epochs import Epoch, Epochs, StaleEpoch, check
from server.limits.tables import gateways


def test_the_first_to_write_the_next_epoch_wins(database):
    first, second = Epochs(database, "a", open_requests), Epochs(database, "b", open_requests)

    async def play():
        await first.beat()
        await second.beat()
        assert first.current is None
        now_ms = await first.now_ms()
        await first.begin(Epoch(1, "redis", 1, now_ms))
        await second.begin(Epoch(1, "local", 1, now_ms))
        assert first.current == second.current
        assert (first.current.number, first.current.mode) == (1, "redis")
        await second.begin(Epoch(2, "local", 1, now_ms))
        await first.beat()
        assert first.current == Epoch(2, "local", 2, now_ms)
        assert first.is_counted
        await second.end()

    asyncio.run(play())
    with database.engine.connect() as conn:
        assert conn.scalars(sa.select(gateways.c.gateway_id)).all() == ["a"]


def test_a_hold_of_another_epoch_is_refused_and_one_without_an_epoch_is_not(database):
    epochs = Epochs(database, "a", open_requests)

    async def play():
        await epochs.begin(Epoch(1, "redis", 1, 0))
        await database.write(lambda conn: check(conn, 1))
        await database.write(lambda conn: check(conn, None))
        with pytest.raises(StaleEpoch) as caught:
            await database.write(lambda conn: check(conn, 2))
        assert caught.value.epoch == 2

    asyncio.run(play())


def test_the_epoch_cannot_move_under_a_hold_that_is_being_written(empty_postgres, tmp_path):
    database = Database(empty_postgres(), data_dir=tmp_path)
    epochs = Epochs(database, "a", open_requests)
    asyncio.run(epochs.begin(Epoch(1, "redis", 1, 0)))
    moved = threading.Thread(target=lambda: asyncio.run(epochs.begin(Epoch(2, "redis", 1, 0))))
    with database.begin() as holding, database.begin() as holding_too:
        check(holding, 1)
        # Holds do not wait for one another.
        check(holding_too, 1)
        moved.start()
        moved.join(0.1)
        assert moved.is_alive()
    moved.join()
    assert epochs.current.number == 2
    database.close()
