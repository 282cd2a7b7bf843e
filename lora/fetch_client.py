"""The engine's end of the fetcher's socket: sends orders and receives answers, without a lock.

engine thread    fetch and drop only put events into a SimpleQueue
fetch-orders     takes the events, owns the orders that wait for an answer, and sends
fetch-answers    connects, receives, and puts answers into the same queue
"""

import contextlib
import itertools
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lora.errors import DROPPED, Failure
from lora.loads import Fetched
from lora.packed import PackedForm
from registry.ref import AdapterRef

_RECONNECT_S = 0.2
_SEND_TIMEOUT_S = 5
_MAX_LINE_BYTES = 64 << 10
ANSWER_MARGIN_S = 15.0
"""Time that the fetcher may take beyond a fetch's timeout, for packing and its read timeouts."""
_LATE = Failure("unavailable", "the fetcher does not answer")


@dataclass(slots=True)
class _Order:
    """A fetch without an answer yet. until: its deadline by the monotonic clock."""

    ref: AdapterRef
    until: float
    is_dropped: bool = False


class FetchClient:
    """Client of the fetcher; it reconnects by itself and then repeats the unanswered orders.

    Every `fetch` is reported once to `done`: with the fetcher's answer, or as unavailable after
    `timeout_s` and a margin. `done` also receives the exception that ends a thread of this client,
    since no reports would follow it.
    """

    def __init__(
        self,
        path: Path,
        form: PackedForm,
        done: Callable[[Fetched | BaseException], None],
        timeout_s: float,
    ) -> None:
        self.path = path
        self.form = form
        self.done = done
        self.timeout_s = timeout_s
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._orders: dict[int, _Order] = {}
        self._connection: socket.socket | None = None
        for name, run in (("orders", self._keep_orders), ("answers", self._receive)):
            threading.Thread(
                target=self._run, args=(run,), name=f"fetch-{name}", daemon=True
            ).start()

    # ---- for the engine thread ----

    def fetch(self, ref: AdapterRef) -> None:
        self._events.put(partial(self._on_fetch, ref))

    def drop(self, key: str) -> None:
        self._events.put(partial(self._on_drop, key))

    # ---- fetch-orders ----

    def _keep_orders(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                handle = self._events.get(timeout=self._patience_s())
                handle()
            self._fail_overdue()

    def _on_fetch(self, ref: AdapterRef) -> None:
        number = next(self._numbers)
        self._orders[number] = _Order(ref, time.monotonic() + self.timeout_s)
        self._send_order(number)

    def _on_drop(self, key: str) -> None:
        for number, order in list(self._orders.items()):
            if order.ref.object_key == key and not order.is_dropped:
                order.is_dropped = True
                if self._connection is None:
                    self._report(number, DROPPED)
                else:
                    self._send({"op": "drop", "order": number})

    def _on_connection(self, connection: socket.socket) -> None:
        """Send the form and all orders to a fetcher that has just been connected."""
        self._connection = connection
        self._send({"op": "hello", "form": asdict(self.form)})
        for number, order in list(self._orders.items()):
            if order.is_dropped:
                self._report(number, DROPPED)
            else:
                self._send_order(number)

    def _on_hang_up(self, connection: socket.socket) -> None:
        connection.close()
        if self._connection is connection:
            self._connection = None

    def _on_answer(self, answer: dict[str, Any]) -> None:
        if self._orders.pop(answer.pop("order"), None) is None:
            return  # the order was reported as overdue before
        failure = answer.pop("failure")
        self.done(Fetched(**answer, failure=failure and Failure(**failure)))

    def _patience_s(self) -> float | None:
        """Seconds until the first order is overdue; None without orders."""
        first = min((order.until for order in self._orders.values()), default=None)
        return None if first is None else max(0.0, first + ANSWER_MARGIN_S - time.monotonic())

    def _fail_overdue(self) -> None:
        last = time.monotonic() - ANSWER_MARGIN_S
        for number in [n for n, order in self._orders.items() if order.until <= last]:
            self._report(number, _LATE)
            self._send({"op": "drop", "order": number})

    def _report(self, number: int, failure: Failure) -> None:
        self.done(Fetched(self._orders.pop(number).ref.object_key, failure))

    def _send_order(self, number: int) -> None:
        order = self._orders[number]
        self._send(
            {
                "op": "fetch",
                "order": number,
                "object_key": order.ref.object_key,
                "digest": order.ref.digest,
                "size_bytes": order.ref.size_bytes,
                "timeout_s": order.until - time.monotonic(),
            }
        )

    def _send(self, line: dict[str, Any]) -> None:
        """Send a line, if connected; unsent orders are repeated on the next connection."""
        if self._connection is None:
            return
        try:
            self._connection.sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            # No line can follow one that may be half sent. The receiver notices the shutdown.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection = None

    # ---- fetch-answers ----

    def _receive(self) -> None:
        while True:
            if connection := self._connect():
                self._events.put(partial(self._on_connection, connection))
                # After a line that is no JSON the connection is replaced, as after a hang-up.
                with (
                    contextlib.suppress(OSError, ValueError),
                    connection.makefile("rb") as lines,
                ):
                    while (line := lines.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
                        self._events.put(partial(self._on_answer, json.loads(line)))
                self._events.put(partial(self._on_hang_up, connection))
            time.sleep(_RECONNECT_S)

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX)
        timeout = struct.pack("@ll", _SEND_TIMEOUT_S, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        try:
            connection.connect(str(self.path))
        except OSError:
            connection.close()
            return None
        return connection

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.done(error)
            raise
