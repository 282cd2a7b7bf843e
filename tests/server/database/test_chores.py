import asyncio

from server.database.chores import Chores
from server.database.database import LedgerUnavailable
from server.database.leases import Leases
from tests.server.factories import Clock


class _Job:
    """A job that counts its turns and raises the given failures in turn."""

    def __init__(self, *failures: Exception | None) -> None:
        self.turns = 0
        self._failures = list(failures)

    async def __call__(self) -> None:
        self.turns += 1
        if self._failures and (error := self._failures.pop(0)):
            raise error


async def look(chores: Chores) -> None:
    await chores.look()
    await asyncio.sleep(0)  # a turn begins when its task runs


async def test_a_chore_is_done_at_once_and_then_an_interval_after_its_last_turn(sqlite_database):
    clock, job = Clock(), _Job()
    chores = Chores(Leases(sqlite_database), [("a", job, 60.0)], clock=clock)
    await look(chores)
    assert job.turns == 1
    await look(chores)  # notices that it ended, at 0
    clock.now = 59.0
    await look(chores)
    assert job.turns == 1
    clock.now = 60.0
    await look(chores)
    assert job.turns == 2


async def test_a_failing_chore_stops_no_other_and_comes_again(sqlite_database, caplog):
    clock, broken, sound = Clock(), _Job(ValueError("why")), _Job()
    jobs = [("broken", broken, 1.0), ("sound", sound, 1.0)]
    chores = Chores(Leases(sqlite_database), jobs, clock=clock)
    for _ in range(6):
        await look(chores)
        clock.now += 1.0
    assert broken.turns == sound.turns == 3
    assert "chore broken failed" in caplog.text
    assert "why" in caplog.text


async def test_a_chore_that_found_the_ledger_away_asks_again_at_the_next_look(
    sqlite_database, caplog
):
    job = _Job(LedgerUnavailable("gone"), LedgerUnavailable("gone"))
    chores = Chores(Leases(sqlite_database), [("a", job, 3600.0)], clock=Clock())
    for _ in range(5):
        await look(chores)
    assert job.turns == 3
    assert not caplog.records


def test_a_chore_does_not_wait_for_another_nor_begin_twice(sqlite_database):
    async def run():
        never, job = asyncio.Event(), _Job()
        begun = []

        async def long() -> None:
            begun.append(1)
            await never.wait()

        clock = Clock()
        chores = Chores(
            Leases(sqlite_database), [("long", long, 1.0), ("a", job, 1.0)], clock=clock
        )
        for _ in range(6):
            await look(chores)
            clock.now += 1.0
        assert (len(begun), job.turns) == (1, 3)
        running = asyncio.create_task(chores.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1, "the long turn is cancelled with the loop"

    asyncio.run(run())


async def test_of_two_gateways_one_does_the_chore(postgres_database):
    jobs = [_Job(), _Job()]
    loops = [Chores(Leases(postgres_database), [("a", job, 0.0)], clock=Clock()) for job in jobs]
    for chores in loops * 4:
        await look(chores)
    assert [job.turns for job in jobs] == [4, 0]
