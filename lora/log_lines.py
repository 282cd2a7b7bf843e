"""Log lines of every process: JSON for machines, or text for a terminal.

A line has `at`, `level`, `process`, `engine` where there is one, and what is told. Of an error it
has types and places only, since its message may quote a prompt, a key or a row.
"""

import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

LogFormat = Literal["json", "text"]
VARIABLE = "LOG_LINES"
"""Environment variable in which a process tells those that it starts the format of their lines."""
_MAX_MESSAGE_CHARACTERS = 2000

logger = logging.getLogger(__name__)


def choose_format(stream: TextIO, chosen: LogFormat | None = None) -> LogFormat:
    """The format that was chosen, here or by the parent; by default text on a terminal alone."""
    wanted = chosen or os.environ.get(VARIABLE)
    return "text" if wanted == "text" or (wanted != "json" and stream.isatty()) else "json"


class LineFormatter(logging.Formatter):
    """Makes lines of messages and of fields.   who: the process, and what else is in each line."""

    def __init__(self, format: LogFormat, **who: str | int) -> None:
        super().__init__()
        self._who = who
        self._render = _json if format == "json" else _text

    def format(self, record: logging.LogRecord) -> str:
        return self.render(fields_of(record))

    def render(self, fields: Mapping[str, Any]) -> str:
        """Make a line of fields, `at` in Unix seconds; those that are None are left out."""
        return self._render(self._who, fields)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Fields of a module's message; of an exception, where it came from."""
    error = record.exc_info[1] if record.exc_info else None
    return {
        "at": record.created,
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage()[:_MAX_MESSAGE_CHARACTERS],
        "trace": None if error is None else trace_of(error),
    }


def begin(process: str, *, level: int = logging.INFO, **who: str | int) -> None:
    """Have this process write its messages as lines to stderr, and the error that ends it."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(choose_format(sys.stderr), process=process, **who))
    take_all(handler, level)


def take_all(handler: logging.Handler, level: int = logging.INFO) -> None:
    """Have a handler take this process's messages, warnings and the errors that nobody catches."""
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = lambda _, error, __: _log_uncaught("this process", error)
    threading.excepthook = lambda args: _log_uncaught("a thread", args.exc_value)


def _log_uncaught(what: str, error: BaseException | None) -> None:
    if not isinstance(error, SystemExit):  # which ends a thread without a word
        logger.critical("an error ends %s", what, exc_info=error)


def trace_of(error: BaseException) -> list[str]:
    """Types and places of an error and of its causes; the innermost comes last.

    A group's cause is its first error. Messages are left out: a KeyError's is the key.
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


def _json(who: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    line = {"at": None, "level": None} | {**who, **fields, "at": _time(fields["at"])}
    shown = {name: value for name, value in line.items() if value is not None}
    return json.dumps(shown, separators=(",", ":"))


def _text(who: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """A line for a terminal: the values without their names; a trace is on lines of its own."""
    shown = {name: str(v) for name, v in fields.items() if v is not None and name != "trace"}
    shown["at"] = _time(fields["at"])[11:19]
    process = " ".join(dict.fromkeys(map(str, who.values())))  # not "engine engine"
    return "\n    ".join([f"{process}: {' '.join(shown.values())}", *(fields.get("trace") or ())])


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
