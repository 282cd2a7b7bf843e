"""How the gateways of one database count limits together: one row, and the fence around it.

An epoch is one way of counting: in Redis, or each gateway a share by itself. Whoever finds that it
no longer holds writes the next one. A request is counted in the epoch of its grant, and `check`
runs in the transaction that writes its hold: it keeps the row from moving until that is committed,
and refuses the hold if the row has moved. So once an epoch is over,

- nothing that was charged under it after its end becomes a request, and
- every request that was admitted under it is among the open holds, or has ended.

Each epoch starts with every rate empty, so that no window of time sees more than one bucket's worth
beyond what refills in it; and with its seats less those of the open holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.database.clock import database_now_ms
from server.database.database import Database
from server.database.upsert import upsert
from server.limits.rules import Limit
from server.limits.tables import gateways, limiter_epochs

Mode = Literal["redis", "local"]

ALIVE_MS = 10_000
"""A gateway that was not seen for that long does not count."""
_FORGOTTEN_MS = 3_600_000

OpenRequests = Callable[[Connection, Limit, int], list[tuple[str, int]]]
"""(conn, limit, now_ms) to (request_id, left_ms) of all that may be under way and take a seat."""


class StaleEpoch(Exception):
    """The gateways count in another way by now: acquire again, then write the hold again."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        super().__init__(f"Limits of epoch {epoch} hold no longer; acquire them again.")


@dataclass(frozen=True, slots=True)
class Epoch:
    """number and since_ms name it.   num_gateways: that share each limit, in mode `local`."""

    number: int
    mode: Mode
    num_gateways: int
    since_ms: int


def check(conn: Connection, epoch: int | None) -> None:
    """Whether a grant of `epoch` may become a hold in this transaction. Raises StaleEpoch.

    The row cannot move until the transaction ends; others may check at the same time.
    """
    if epoch is not None and conn.scalar(_SHARED_NUMBER) != epoch:
        raise StaleEpoch(epoch)


class Epochs:
    """The row as one gateway knows it, and this gateway's heartbeat. Raises LedgerUnavailable."""

    def __init__(
        self,
        database: Database,
        gateway_id: str,
        open_requests: OpenRequests,
        *,
        clock: Callable[[Connection], int] = database_now_ms,
    ) -> None:
        self._database = database
        self._gateway_id = gateway_id
        self._open_requests = open_requests
        self._clock = clock
        self._seen_at_ms: int | None = None
        self.current: Epoch | None = None
        self.is_counted = False
        """Whether this gateway is one of the current epoch's `num_gateways`, to its knowledge."""

    async def refresh(self) -> None:
        """Read the row."""
        self._adopt(await self._database.read(_find))

    async def now_ms(self) -> int:
        """On the database's clock."""
        return await self._database.read(self._clock)

    async def carried(self, limits: Sequence[Limit]) -> dict[Limit, list[tuple[str, int]]]:
        """The open requests of each limit."""

        def read(conn: Connection) -> dict[Limit, list[tuple[str, int]]]:
            now_ms = self._clock(conn)
            return {limit: self._open_requests(conn, limit, now_ms) for limit in limits}

        return await self._database.read(read)

    async def beat(self) -> None:
        """This gateway is alive; and read the row."""

        def write(conn: Connection) -> tuple[int, Epoch | None]:
            # Locked: the next epoch either counts this beat, or is read here.
            conn.scalar(_SHARED_NUMBER)
            now_ms = self._clock(conn)
            _see(conn, self._gateway_id, now_ms)
            conn.execute(sa.delete(gateways).where(gateways.c.seen_at_ms < now_ms - _FORGOTTEN_MS))
            return now_ms, _find(conn)

        now_ms, epoch = await self._database.write(write)
        self._adopt(epoch)
        self._seen_at_ms = now_ms

    async def begin(self, epoch: Epoch) -> None:
        """Write `epoch` if its number is the next; and read what is there.

        Nothing is written if another gateway was first. num_gateways is counted here.
        """

        def write(conn: Connection) -> tuple[bool, Epoch | None]:
            conn.execute(
                upsert(conn.dialect.name, limiter_epochs).values(_NEVER).on_conflict_do_nothing()
            )
            is_next = conn.scalar(_LOCKED_NUMBER) == epoch.number - 1
            if is_next:
                _see(conn, self._gateway_id, self._clock(conn))
                # Itself at least.
                num_gateways = conn.scalar(_count_alive(epoch.since_ms))
                values = dict(
                    epoch=epoch.number,
                    mode=epoch.mode,
                    num_gateways=num_gateways,
                    since_ms=epoch.since_ms,
                )
                conn.execute(sa.update(limiter_epochs).values(values))
            return is_next, _find(conn)

        is_mine, found = await self._database.write(write)
        self._adopt(found)
        self.is_counted = self.is_counted or is_mine

    async def end(self) -> None:
        """This gateway serves no more."""
        own = sa.delete(gateways).where(gateways.c.gateway_id == self._gateway_id)
        await self._database.write(lambda conn: conn.execute(own).rowcount)

    def _adopt(self, epoch: Epoch | None) -> None:
        if epoch is None or (self.current and self.current.number >= epoch.number):
            return
        # The last beat was written in an earlier epoch, or it would have been read with it.
        self.is_counted = (self._seen_at_ms or 0) > epoch.since_ms - ALIVE_MS
        self.current = epoch


_NUMBER = sa.select(limiter_epochs.c.epoch)
_SHARED_NUMBER = _NUMBER.with_for_update(read=True)
_LOCKED_NUMBER = _NUMBER.with_for_update()
_NEVER = dict(name="limits", epoch=0, mode="local", num_gateways=1, since_ms=0)
"""What the one row is before the first epoch."""


def _find(conn: Connection) -> Epoch | None:
    row = conn.execute(sa.select(limiter_epochs)).first()
    return Epoch(row.epoch, row.mode, row.num_gateways, row.since_ms) if row else None


def _see(conn: Connection, gateway_id: str, now_ms: int) -> None:
    values = dict(gateway_id=gateway_id, started_at_ms=now_ms, seen_at_ms=now_ms)
    conn.execute(
        upsert(conn.dialect.name, gateways)
        .values(values)
        .on_conflict_do_update(index_elements=["gateway_id"], set_={"seen_at_ms": now_ms})
    )


def _count_alive(now_ms: int) -> "sa.Select[int]":
    return sa.select(sa.func.count()).where(gateways.c.seen_at_ms > now_ms - ALIVE_MS)
