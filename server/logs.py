"""The gateway's log: a line for each request, and one for each message of its modules.

Lines hold ids and figures. Nothing of a request's path, query, headers or body is in them. Of an
error they hold types and places only, since its message may quote any of these.
"""

import json
import logging
import queue
import threading
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]

# Lines, 10 MB of them, that a slow reader of stderr may lag behind before lines are dropped.
MAX_LINES = 20_000
_MAX_MESSAGE_CHARACTERS = 2000

_noted: ContextVar[dict[str, object] | None] = ContextVar("noted", default=None)


def note(**fields: object) -> None:
    """Add ids and figures to the line of the request that this task serves, if it serves one."""
    line = _noted.get()
    if line is not None:
        line.update(fields)


def begin_notes() -> dict[str, object]:
    """Begin the fields that `note` adds to, in this task and in the tasks that it starts."""
    fields: dict[str, object] = {}
    _noted.set(fields)
    return fields


class LogWriter:
    """Writes lines on a thread of its own, so that no request waits for their reader.

    num_dropped: lines that found the queue full.
    """

    def __init__(self, stream: TextIO, format: LogFormat, *, max_lines: int = MAX_LINES) -> None:
        self.num_dropped = 0
        self._stream = stream
        self._render = _json if format == "json" else _text
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Queue a line for the log; if the queue is full, the line is dropped and counted.

        line: at in Unix seconds, level, and fields; those that are None are left out.
        """
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the lines that are queued, for `timeout_s` at most, and stop."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(self._render(line) + "\n")
                # One flush for all queued lines; the last of them may have None behind it.
                if self._lines.qsize() <= 1:
                    self._stream.flush()
            except (OSError, ValueError):  # the stream is closed
                self.num_dropped += 1


class LogHandler(logging.Handler):
    """Writes the messages of modules as lines; of an exception, where it came from."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._writer.write(
            {
                "at": record.created,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage()[:_MAX_MESSAGE_CHARACTERS],
                "trace": None if error is None else trace_of(error),
            }
        )


def trace_of(error: BaseException) -> list[str]:
    """Types and places of an error and of its causes; the innermost comes last.

    A group's cause is its first error.

    Messages are left out: a KeyError's is the key, a database error's has the parameters.
    """
    places: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = traceback.extract_tb(cause.__traceback__)
        places.append(type(cause).__qualname__)
        places += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        within = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else None
        cause = within or cause.__cause__ or cause.__context__
    return places


def _json(line: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in line.items() if value is not None}
    shown["at"] = _time(shown["at"])
    return json.dumps(shown, separators=(",", ":"))


def _text(line: Mapping[str, Any]) -> str:
    """A line for a terminal: the values without their names; a trace is on lines of its own."""
    fields = {name: str(v) for name, v in line.items() if v is not None and name != "trace"}
    fields["at"] = _time(line["at"])[11:19]
    return "\n    ".join(["gateway: " + " ".join(fields.values()), *(line.get("trace") or ())])


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
