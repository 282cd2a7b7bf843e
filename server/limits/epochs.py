"""Epochs: the way in which the gateways of one database count limits, agreed on in one row.

An epoch is one way of counting: in Redis, or each gateway a share by itself. A gateway that finds
that the present way does not work any more writes the next epoch. A request is counted in the epoch
of its grant, and `check` runs in the transaction that writes its hold: `check` keeps the row from
moving until that transaction is committed, and refuses the hold if the row has moved. So once an
epoch is over,

- nothing that was charged under it after its end becomes a request, and
- every request that was admitted under it is among the open holds, or has ended.

Each epoch starts with every rate empty, so that no window of time sees more than one bucket's worth
beyond what refills in it; and with the seats of the open holds taken.
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
"""Milliseconds without a heartbeat after which a gateway no longer counts."""
_FORGOTTEN_MS = 3_600_000

OpenRequests = Callable[[Connection, Limit, int], list[tuple[str, int]]]
"""Function (conn, limit, now_ms) that returns (request_id, left_ms) of all requests that may be
under way and so hold a seat of the limit.
"""


class StaleEpoch(Exception):
    """The gateways count in another way by now: the caller acquires and writes the hold again."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        super().__init__(f"Limits of epoch {epoch} hold no longer; acquire them again.")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One way of counting, identified by number and since_ms.

    num_gateways: gateways that share each limit, in mode `local`.
    """

    number: int
    mode: Mode
    num_gateways: int
    since_ms: int


def check(conn: Connection, epoch: int | None) -> None:
    """Check that a grant of `epoch` may become a hold in this transaction. Raises StaleEpoch.

    The row cannot move until the transaction ends; other transactions may check at the same time.
    """
    if epoch is not None and conn.scalar(_SHARED_NUMBER) != epoch:
        raise StaleEpoch(epoch)


class Epochs:
    """The row as one gateway knows it, and the gateway's heartbeat.

    The methods raise LedgerUnavailable.
    """

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
        """Unix milliseconds by the database's clock."""
        return await self._database.read(self._clock)

    async def carried(self, limits: Sequence[Limit]) -> dict[Limit, list[tuple[str, int]]]:
        """The open requests of each limit, as `OpenRequests` finds them."""

        def read(conn: Connection) -> dict[Limit, list[tuple[str, int]]]:
            now_ms = self._clock(conn)
            return {limit: self._open_requests(conn, limit, now_ms) for limit in limits}

        return await self._database.read(read)

    async def beat(self) -> None:
        """Note that this gateway is alive, and read the row."""

        def write(conn: Connection) -> tuple[int, Epoch | None]:
            # The row is locked, so that the next epoch either counts this beat or is read here.
            conn.scalar(_SHARED_NUMBER)
            now_ms = self._clock(conn)
            _see(conn, self._gateway_id, now_ms)
            conn.execute(sa.delete(gateways).where(gateways.c.seen_at_ms < now_ms - _FORGOTTEN_MS))
            return now_ms, _find(conn)

        now_ms, epoch = await self._database.write(write)
        self._adopt(epoch)
        self._seen_at_ms = now_ms

    async def begin(self, epoch: Epoch) -> None:
        """Write `epoch` if its number is the next, and read the row.

        Nothing is written if another gateway was first. num_gateways is counted here, whatever it
        is in `epoch`.
        """

        def write(conn: Connection) -> tuple[bool, Epoch | None]:
            conn.execute(
                upsert(conn.dialect.name, limiter_epochs).values(_NEVER).on_conflict_do_nothing()
            )
            is_next = conn.scalar(_LOCKED_NUMBER) == epoch.number - 1
            if is_next:
                _see(conn, self._gateway_id, self._clock(conn))
                # The number is 1 at least, since this gateway has just been seen.
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
        """Note that this gateway serves no more."""
        own = sa.delete(gateways).where(gateways.c.gateway_id == self._gateway_id)
        await self._database.write(lambda conn: conn.execute(own).rowcount)

    def _adopt(self, epoch: Epoch | None) -> None:
        if epoch is None or (self.current and self.current.number >= epoch.number):
            return
        # The last beat was written before this epoch: otherwise `beat` would have read the epoch.
        self.is_counted = (self._seen_at_ms or 0) > epoch.since_ms - ALIVE_MS
        self.current = epoch


_NUMBER = sa.select(limiter_epochs.c.epoch)
_SHARED_NUMBER = _NUMBER.with_for_update(read=True)
_LOCKED_NUMBER = _NUMBER.with_for_update()
_NEVER = dict(name="limits", epoch=0, mode="local", num_gateways=1, since_ms=0)
"""Values of the one row before the first epoch."""


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
