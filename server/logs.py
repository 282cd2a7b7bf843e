"""What a gateway says of itself, a line each: requests, and what its modules log.

Lines hold ids and figures. Nothing of a request's path, query, headers or body is in them, and of
an error its types and places: what it says may quote any of these.
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

# 10 MB of lines: what a slow reader of stderr may lag behind before lines are dropped.
MAX_LINES = 20_000
_MAX_MESSAGE_CHARACTERS = 2000

_noted: ContextVar[dict[str, object] | None] = ContextVar("noted", default=None)


def note(**fields: object) -> None:
    """For the line of the request that this is done for, if there is one. Ids and figures only."""
    line = _noted.get()
    if line is not None:
        line.update(fields)


def begin_notes() -> dict[str, object]:
    """What is noted from here on in this task, and in those that it starts."""
    fields: dict[str, object] = {}
    _noted.set(fields)
    return fields


class LogWriter:
    """Writes lines on a thread of its own: no request waits for who reads them.

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
        """line: at in Unix seconds, level, and fields; those that are None are left out."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is there, as far as the time goes."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(self._render(line) + "\n")
                # One system call for those that wait together; behind the last, None.
                if self._lines.qsize() <= 1:
                    self._stream.flush()
            except (OSError, ValueError):  # nobody reads any more
                self.num_dropped += 1


class LogHandler(logging.Handler):
    """Modules' own messages as such lines; of an exception, where it came from."""

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
    """Types and places of an error and of what caused it; the innermost comes last.

    Not its words: a KeyError's are the key, a database's the parameters.
    """
    places: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = traceback.extract_tb(cause.__traceback__)
        places.append(type(cause).__qualname__)
        places += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        cause = cause.__cause__ or cause.__context__
    return places


def _json(line: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in line.items() if value is not None}
    shown["at"] = _time(shown["at"])
    return json.dumps(shown, separators=(",", ":"))


def _text(line: Mapping[str, Any]) -> str:
    """For a terminal: what there is without its names; a trace on lines of its own."""
    fields = {name: str(v) for name, v in line.items() if v is not None and name != "trace"}
    fields["at"] = _time(line["at"])[11:19]
    return "\n    ".join(["gateway: " + " ".join(fields.values()), *(line.get("trace") or ())])


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
