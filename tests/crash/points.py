"""Failpoints: places around every commit, fsync and send where a process can be told to die.

They are set around the product's interfaces, in forked processes only; the product's code does not
know them.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import zmq
from sqlalchemy.engine import Engine
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.journal.files import Disk
from engine.wire.encoding import decode
from engine.wire.messages import AbortRequests, AddRequest, ReadJournal, StepOutputs
from engine.wire.ready_socket import ReadySocket
from engine.wire.records import JournalRecords
from server.api.gateway import Gateway

READY_PATH = "/is-ready"


def _around(*names: str) -> list[str]:
    return [f"{name}.{side}" for name in names for side in ("before", "after")]


ENGINE_POINTS = (
    *_around("engine.journal.progress", "engine.journal.ends"),
    "engine.journal.progress.torn",
    "engine.journal.ends.torn",
    *_around("engine.journal.fdatasync", "engine.journal.segment", "engine.journal.delete"),
    *_around("engine.send.tokens", "engine.send.last", "engine.send.journal"),
)
GATEWAY_POINTS = (
    *_around("gateway.commit.hold", "gateway.commit.failed", "gateway.commit.settle"),
    *_around("gateway.commit.refused", "gateway.commit.expired"),
    *_around("gateway.send.add", "gateway.send.abort", "gateway.send.read"),
    *_around("gateway.http.start", "gateway.http.chunk", "gateway.http.last"),
)
POINTS = (*ENGINE_POINTS, *GATEWAY_POINTS)


_MAX_LOOKS = 10_000


@dataclass(frozen=True, slots=True)
class Kill:
    """An order to die when a process reaches this point for the nth time."""

    point: str
    nth: int


class Points:
    """The failpoints of one process. mark: file to which the point is written before it dies."""

    def __init__(self, kill: Kill | None, mark: Path) -> None:
        self._kill = kill
        self._mark = mark
        self._count = 0

    def reach(self, point: str) -> None:
        if self.is_due(point):
            self.die()

    def is_due(self, point: str) -> bool:
        if self._kill is None or point != self._kill.point:
            return False
        self._count += 1
        return self._count == self._kill.nth

    def die(self) -> None:
        assert self._kill is not None
        with self._mark.open("a") as file:
            file.write(f"{self._kill.point}\n")
        _wait_for_sends()
        os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def around(self, name: str | None) -> Any:
        if name:
            self.reach(f"{name}.before")
        yield
        if name:
            self.reach(f"{name}.after")


def _wait_for_sends() -> None:
    """Wait until ZMQ's own thread sleeps, which it does when it has sent all its messages."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("ZMQbg/IO"):
            for _ in range(_MAX_LOOKS):
                if (task / "stat").read_text().rpartition(")")[2].split()[0] == "S":
                    break
                os.sched_yield()


# ---- the engine ----


class PointedDisk(Disk):
    """The journal's disk; `torn` dies with half of the bytes written."""

    def __init__(self, points: Points) -> None:
        self._points = points

    def write(self, file: int, data: memoryview, offset: int) -> int:
        kind = "ends" if b'["end",' in bytes(data) else "progress"
        if self._points.is_due(f"engine.journal.{kind}.torn"):
            super().write(file, data[: len(data) // 2], offset)
            self._points.die()
        with self._points.around(f"engine.journal.{kind}"):
            return super().write(file, data, offset)


def point_journal_files(points: Points, archive: Path) -> None:
    """Set failpoints at syncs, new segments and deleted segments, which go to `archive` instead."""
    fdatasync, rename, unlink = os.fdatasync, Path.rename, Path.unlink

    def pointed_fdatasync(file: int) -> None:
        with points.around("engine.journal.fdatasync"):
            fdatasync(file)

    def pointed_rename(path: Path, target: Path) -> Path:
        with points.around("engine.journal.segment" if target.suffix == ".journal" else None):
            return rename(path, target)

    def archiving_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix != ".journal":
            unlink(path, missing_ok)
            return
        with points.around("engine.journal.delete"):
            rename(path, archive / path.name)

    os.fdatasync = pointed_fdatasync
    Path.rename = pointed_rename  # type: ignore[method-assign, assignment]
    Path.unlink = archiving_unlink  # type: ignore[method-assign]


def point_engine_socket(points: Points) -> None:
    send_multipart = zmq.Socket.send_multipart

    def pointed(socket: Any, parts: list[bytes], *options: Any) -> Any:
        with points.around(_sent_by_engine(parts[-1])):
            return send_multipart(socket, parts, *options)

    zmq.Socket.send_multipart = pointed  # type: ignore[method-assign, assignment]


def _sent_by_engine(frame: bytes) -> str | None:
    match decode(frame)[1]:
        case StepOutputs(outputs=outputs):
            is_last = any(output.is_last for output in outputs)
            return "engine.send.last" if is_last else "engine.send.tokens"
        case JournalRecords():
            return "engine.send.journal"
    return None


# ---- the gateway ----

_SENT_BY_GATEWAY = {
    AddRequest: "gateway.send.add",
    AbortRequests: "gateway.send.abort",
    ReadJournal: "gateway.send.read",
}


def point_gateway_socket(points: Points) -> None:
    write = ReadySocket.write

    async def pointed(socket: ReadySocket, frame: bytes) -> None:
        with points.around(_SENT_BY_GATEWAY.get(type(decode(frame)[1]))):
            await write(socket, frame)

    ReadySocket.write = pointed  # type: ignore[method-assign]


class _Statements(threading.local):
    """The statements of this thread's transaction, with their parameters."""

    def __init__(self) -> None:
        self.statements: list[str] = []


def point_commits(points: Points, engine: Engine) -> None:
    """Set failpoints at commits of the named kinds; a transaction may be of several kinds."""
    done = _Statements()
    commit: Callable[[Any], None] = engine.dialect.do_commit

    @sa.event.listens_for(engine, "begin", insert=True)
    def begin(conn: Any) -> None:
        done.statements.clear()

    @sa.event.listens_for(engine, "before_cursor_execute")
    def execute(conn: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        done.statements.append(f"{statement} {parameters}")

    def pointed(connection: Any) -> None:
        with contextlib.ExitStack() as stack:
            for name in _done_by(done.statements):
                stack.enter_context(points.around(f"gateway.commit.{name}"))
            commit(connection)

    engine.dialect.do_commit = pointed  # type: ignore[method-assign]


def _done_by(statements: list[str]) -> list[str]:
    text = "\n".join(statements)
    done = {
        "hold": "INSERT INTO holds" in text,
        "settle": "INSERT INTO usage_events" in text,
        "failed": "UPDATE holds SET failed_at_ms" in text,
    }
    # A transaction that voids expired holds selects them by their expiry first.
    voided = "expired" if "holds.expires_at_ms <" in text else "refused"
    done[voided] = "UPDATE holds SET state" in text and "'voided'" in text
    return [name for name, is_done in done.items() if is_done]


class PointedApp:
    """The application, with failpoints where its answers leave.

    READY_PATH is answered here: FastAPI would build all its routes for that request, which takes
    longer than the rest of a start.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway, points: Points) -> None:
        self._app = app
        self._gateway = gateway
        self._points = points

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        if is_http and scope["path"] == READY_PATH:
            status = 200 if self._gateway.bases.is_ready else 503
            await Response(status_code=status)(scope, receive, send)
            return

        async def pointed(message: Message) -> None:
            with self._points.around(_sent_to_client(message) if is_http else None):
                await send(message)

        await self._app(scope, receive, pointed)


def _sent_to_client(message: Message) -> str | None:
    match message:
        case {"type": "http.response.start"}:
            return "gateway.http.start"
        case {"type": "http.response.body", "more_body": True}:
            return "gateway.http.chunk"
        case {"type": "http.response.body"}:
            return "gateway.http.last"
    return None
