"""Connections to PostgreSQL that give up on a server that takes a statement and never answers.

The server's own timeouts cannot help there, nor TCP's: the kernel of a suspended or swapping
server goes on to acknowledge what it is sent.
"""

import time
from collections.abc import Generator
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import Engine


class _Connection(psycopg.Connection[Any]):
    """A connection that is closed if the answer to a statement takes longer than its timeout."""

    answer_timeout_s = 0.0

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **options: Any) -> Any:
        return super().wait(self._in_time(gen), *args, **options)

    def _in_time(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Pass on everything between psycopg's loop and `gen`, until the time is over.

        The loop sends 0 ten times a second while nothing arrives.
        """
        until = time.monotonic() + self.answer_timeout_s
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > until:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"the server has not answered for {self.answer_timeout_s:g} s"
                    )
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def bound_answers(engine: Engine, answer_timeout_s: float) -> None:
    """Have the engine's connections wait at most this long for the answer to a statement."""

    def connect(_dialect: object, _record: object, args: Any, options: Any) -> _Connection:
        connection = _Connection.connect(*args, **options)
        connection.answer_timeout_s = answer_timeout_s
        return connection

    sa.event.listen(engine, "do_connect", connect)
