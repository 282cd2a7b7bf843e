"""The spans of a request under way: code on its path is `traced`, and notes ids and figures.

Without an exporter no request has a span; then a traced call costs a look at a context variable.
"""

import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_within: ContextVar["Span | None"] = ContextVar("within", default=None)


@dataclass(slots=True, eq=False)
class Span:
    """A stretch of a request's time; the outermost one is the whole request.

    traceparent: the outermost one's place in its trace, in the header's form; None elsewhere.
    began_at, ended_at: seconds of `time.monotonic`.   notes: ids and figures; None is not known.
    takes_notes: whether what is noted within it is its own; if not, it is its parent's.
    error: code or class of the error that ended it.   parts: the spans within it.
    """

    name: str
    parent: "Span | None" = None
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    takes_notes: bool = True
    notes: dict[str, object] = field(default_factory=dict)
    error: str | None = None
    parts: list["Span"] = field(default_factory=list)
    traceparent: str | None = None

    def part(self, name: str, *, takes_notes: bool) -> "Span":
        """Begin a span within this one."""
        part = Span(name, self, takes_notes=takes_notes)
        self.parts.append(part)
        return part

    def add_first(self, name: str, seconds: float) -> None:
        """Add a span of this one's first seconds."""
        ended_at = min(self.began_at + seconds, self.ended_at)
        self.parts.append(Span(name, self, self.began_at, ended_at))

    def end(self) -> None:
        """End the span; those around it end no earlier."""
        now, span = time.monotonic(), self
        span.ended_at = now
        while span.parent is not None:
            span = span.parent
            span.ended_at = now


class Tracer(Protocol):
    """Exports spans. It never waits: what finds its queue full is dropped."""

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """Begin the span of a request.

        headers: of the request, with names in lower case; `traceparent` names its caller's span.
        """

    def export(self, request: Span) -> None:
        """Export the span that `begin` returned, now that it has ended, and those within it."""

    def export_late(self, name: str, traceparents: Sequence[str], began_at: float) -> None:
        """Export work for requests, which ends now, as a span within that of each."""

    def close(self) -> None:
        """Export what is queued, for a bounded time."""


def enter(request: Span) -> None:
    """Have what this task and the tasks that it starts do be within a request's span."""
    _within.set(request)


def traceparent() -> str | None:
    """The place in its trace of the request that this task serves, if it is exported."""
    span = _within.get()
    while span is not None and span.parent is not None:
        span = span.parent
    place = span.traceparent if span else None
    return place if place and place.endswith("-01") else None


def traced(
    name: str, *, takes_notes: bool = False
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Make each call of an async function a span within the one that it is called in."""

    def decorate(
        work: Callable[P, Coroutine[Any, Any, T]],
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(work)
        def call(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
            within = _within.get()
            if within is None:
                return work(*args, **kwargs)
            return _run(within.part(name, takes_notes=takes_notes), work(*args, **kwargs))

        return call

    return decorate


async def _run(span: Span, work: Coroutine[Any, Any, T]) -> T:
    token = _within.set(span)
    try:
        return await work
    except BaseException as error:
        code = getattr(error, "code", None)
        span.error = code if isinstance(code, str) else type(error).__name__
        raise
    finally:
        span.end()
        _within.reset(token)


def add_parts(*parts: tuple[str, float | None, dict[str, object]]) -> dict[str, Span]:
    """Add spans to the one that this is called in; they follow one another, and the last ends now.

    parts: name, seconds, and notes of each; None for one that was not. Returns them by name.
    """
    added: dict[str, Span] = {}
    within = _within.get()
    if within is None:
        return added
    ended_at = time.monotonic()
    for name, seconds, notes in reversed(parts):
        if seconds is not None:
            # The engine has clocks of its own: what it says must fit in what was seen of it.
            began_at = max(within.began_at, ended_at - seconds)
            added[name] = Span(name, within, began_at, ended_at, notes=notes)
            ended_at = began_at
    within.parts += added.values()
    return added


def note(**notes: object) -> None:
    """Note ids and figures of the request, or of the attempt at it, that this task serves."""
    span = _within.get()
    while span is not None and not span.takes_notes:
        span = span.parent
    if span is not None:
        span.notes.update(notes)


def note_error(code: str | None) -> None:
    """Note the error that the client gets, by its code if it has one."""
    span = _within.get()
    if span is not None:
        span.error = code
