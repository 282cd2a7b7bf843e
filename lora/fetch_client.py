"""The engine's end of the fetcher's socket: asks for each adapter on a connection of its own."""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lora.errors import DROPPED, Failure
from lora.loads import Fetched
from lora.packed import PackedForm
from registry.ref import AdapterRef

_RECONNECT_S = 0.2
_MAX_LINE_BYTES = 64 << 10
ANSWER_MARGIN_S = 15.0
"""Time that the fetcher may take beyond a fetch's timeout, for packing and its read timeouts."""
_LATE = Failure("unavailable", "the fetcher does not answer")


@dataclass(slots=True, eq=False)
class _Order:
    """A fetch without an answer yet. until: its deadline by the monotonic clock."""

    ref: AdapterRef
    until: float
    is_dropped: bool = False
    connection: socket.socket | None = None

    def drop(self) -> None:
        """End the wait for an answer, without waiting for that."""
        self.is_dropped = True
        if self.connection is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self.connection.shutdown(socket.SHUT_RDWR)


class FetchClient:
    """Client of the fetcher. A fetcher that dies is asked again when there is a new one.

    Every `fetch` is reported once to `done`: with the fetcher's answer, as dropped, or as
    unavailable after `timeout_s` and a margin. `done` also receives the exception that ends a
    thread of this client, since no reports would follow it.
    max_fetches: threads, each of which waits for one answer; further fetches wait for a thread.
    """

    def __init__(
        self,
        path: Path,
        form: PackedForm,
        done: Callable[[Fetched | BaseException], None],
        timeout_s: float,
        max_fetches: int,
    ) -> None:
        self.path = path
        self.form = json.dumps(asdict(form))
        self.done = done
        self.timeout_s = timeout_s
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._unanswered: set[_Order] = set()
        for number in range(max_fetches):
            threading.Thread(target=self._run, name=f"fetch-{number}", daemon=True).start()

    # ---- for the engine thread ----

    def fetch(self, ref: AdapterRef) -> None:
        order = _Order(ref, time.monotonic() + self.timeout_s)
        self._unanswered.add(order)
        self._orders.put(order)

    def drop(self, key: str) -> None:
        for order in list(self._unanswered):
            if order.ref.object_key == key:
                order.drop()

    # ---- on the client's threads ----

    def _run(self) -> None:
        try:
            while True:
                order = self._orders.get()
                fetched = self._fetch(order)
                self._unanswered.discard(order)
                self.done(fetched)
        except BaseException as error:
            self.done(error)
            raise

    def _fetch(self, order: _Order) -> Fetched:
        """Ask until there is an answer, the order is dropped, or it is too late."""
        last = order.until + ANSWER_MARGIN_S
        while not order.is_dropped and (left_s := last - time.monotonic()) > 0:
            try:
                return self._ask(order, left_s)
            except (OSError, ValueError):  # there is no fetcher, or it ended before a whole answer
                if not order.is_dropped:
                    time.sleep(_RECONNECT_S)
        return Fetched(order.ref.object_key, DROPPED if order.is_dropped else _LATE)

    def _ask(self, order: _Order, timeout_s: float) -> Fetched:
        """Send the order, and wait for the answer. Raises OSError and ValueError."""
        ref = order.ref
        names = {"object_key": ref.object_key, "digest": ref.digest, "size_bytes": ref.size_bytes}
        line = {"form": self.form, "until": order.until, **names}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self.path))
            order.connection = connection
            if order.is_dropped:  # so early that there was no connection to shut down
                raise ConnectionAbortedError
            connection.sendall(json.dumps(line).encode() + b"\n")
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline(_MAX_LINE_BYTES))
        failure = answer.pop("failure")
        return Fetched(**answer, failure=failure and Failure(**failure))
