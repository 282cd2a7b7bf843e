"""The gateway's log: a line for each request, and one for each message of its modules.

Lines hold ids and figures. Nothing of a request's path, query, headers or body is in them. Their
form is that of all processes (lora.log_lines).
"""

import logging
import queue
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal, TextIO

from lora.log_lines import LineFormatter, LogFormat, fields_of

LogLevel = Literal["debug", "info"]

# Lines, 10 MB of them, that a slow reader of stderr may lag behind before lines are dropped.
MAX_LINES = 20_000

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

    num_dropped: lines that found the queue full.   level: "info" leaves out lines of level debug.
    process: the gateway's name in each line.
    """

    def __init__(
        self,
        stream: TextIO,
        format: LogFormat,
        level: LogLevel = "info",
        *,
        process: str = "gateway",
        max_lines: int = MAX_LINES,
    ) -> None:
        self.num_dropped = 0
        self._stream = stream
        self._level = level
        self._render = LineFormatter(format, process=process).render
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def write(self, line: Mapping[str, Any]) -> None:
        """Queue a line for the log; if the queue is full, the line is dropped and counted.

        line: its fields, as LineFormatter.render takes them.
        """
        if line.get("level") == "debug" and self._level != "debug":
            return
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
    """Writes the messages of modules as lines."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.write(fields_of(record))
