"""The tool calls in one region of an answer, read as they come."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pydantic_core import from_json

from server.tools.response_template import CallRegion

BLANK = r"[ \n]?"
"""A blank that may stand between the marks and the objects of calls."""
NAME = r"[A-Za-z0-9_-]{1,64}"
_MOST_BLANKS = 4
"""Blanks and brackets before a region's closing mark, and a little more."""
_MOST_CHARACTERS = 256
"""Longest text before a call's arguments, and after them."""
_BRACKETS = re.compile(r'[{}\[\]"\\]')


@dataclass(slots=True)
class CallPart:
    """A part of a tool call.   name: in its first part only.   arguments: text that follows."""

    name: str | None = None
    arguments: str = ""


class CallReader:
    """Reads a region behind its opening mark.

    raw: text since the last complete call.   rest: what follows the region, once it `is_over`.
    has_failed: what was read goes on as no call.   has_begun: an incomplete call was given in part.
    most: how many calls there may be; None for any number.
    """

    def __init__(
        self, region: CallRegion, opening: str, names: Collection[str], most: int | None
    ) -> None:
        self._region = region
        self._names = names
        self._most = most
        self._patterns = _Patterns(region)
        self._step: Callable[[bool], list[CallPart]] = self._head
        self._buffer = ""
        self._arguments = ""
        self._depth = 0
        self._is_in_string = False
        self._num_escaped = 0
        self.raw = opening
        self.rest = ""
        self.num_calls = 0
        self.has_begun = self.has_failed = self.is_over = False
        self.is_closed = False
        """Whether the region has an end of its own, with everything that belongs to it."""

    def push(self, text: str, *, final: bool = False) -> list[CallPart]:
        """The parts that this text adds."""
        self._buffer += text
        parts: list[CallPart] = []
        while not (self.has_failed or self.is_over):
            step, before = self._step, len(self._buffer)
            parts += step(final)
            if self._step == step and len(self._buffer) == before:
                break
        if self.has_failed:
            self.raw += self._buffer
            self._buffer = ""
        return parts

    # ---- steps ----

    def _head(self, final: bool) -> list[CallPart]:
        pattern = self._patterns.next_head if self.num_calls else self._patterns.head
        found = pattern.match(self._buffer)
        if found is None:
            self.has_failed = final or len(self._buffer) > _MOST_CHARACTERS
        elif found["name"] not in self._names:
            self.has_failed = True
        elif self._buffer[found.end() : found.end() + 1] != "{":
            self.has_failed = final or found.end() < len(self._buffer)
        else:
            self._take(found.end())
            self._arguments, self._depth, self._is_in_string = "", 0, False
            self._step = self._value
            self.has_begun = True
            return [CallPart(name=found["name"])]
        return []

    def _value(self, final: bool) -> list[CallPart]:
        """Pass on the arguments, up to the bracket that closes them."""
        at, end = self._num_escaped, 0
        while not end and (found := _BRACKETS.search(self._buffer, at)):
            at = found.end()
            if self._is_in_string and found[0] == "\\":
                at += 1
            elif found[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if found[0] in "{[" else -1
                end = at if self._depth == 0 else 0
        # What a backslash escapes may be still to come.
        self._num_escaped = max(0, at - len(self._buffer))
        text = self._take(end or len(self._buffer))
        self._arguments += text
        if end:
            self._step = self._tail
            self.has_failed = not _is_object(self._arguments)
        else:
            self.has_failed = final
        return [CallPart(arguments=text)] if text else []

    def _tail(self, final: bool) -> list[CallPart]:
        found = self._patterns.tail.match(self._buffer)
        if found is None:
            is_lost = self._buffer[:1] not in ("", ",") or len(self._buffer) > _MOST_CHARACTERS
            self.has_failed = final or is_lost
        else:
            self._take(found.end())
            self.num_calls += 1
            self.raw, self.has_begun = "", False
            self._step = self._after
        return []

    def _after(self, final: bool) -> list[CallPart]:
        """Find the next call of a list, or the end of the region."""
        may_go_on = self._region.is_list and self.num_calls != self._most
        if may_go_on and self._patterns.comma.match(self._buffer):
            self._step = self._head
        elif found := self._patterns.end.match(self._buffer):
            self.rest = self._buffer[found.end() :]
            self.is_over = self.is_closed = True
        elif final or self._patterns.is_no_end(self._buffer):
            self.rest, self.is_over = self._buffer, True
        return []

    def _take(self, end: int) -> str:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self.raw += text
        return text


class _Patterns:
    """A region's rules as expressions."""

    def __init__(self, region: CallRegion) -> None:
        name = f"(?P<name>{NAME})"
        call = re.escape(region.beginning) + name + f'", "{region.arguments_key}": '
        tail = r"\}"
        if region.id_key:
            tail = f'(?:, "{region.id_key}": "{NAME}")?' + tail
        if region.name_end is not None:
            call, tail = name + re.escape(region.name_end) + BLANK, ""
        bracket = rf"\[{BLANK}" if region.is_list else ""
        self.head = re.compile(BLANK + bracket + call)
        self.next_head = re.compile(f"{BLANK},{BLANK}{call}")
        self.comma = re.compile(f"{BLANK},")
        self.tail = re.compile(tail)
        closes = "|".join(map(re.escape, sorted(region.closes, key=len, reverse=True)))
        self._closes = region.closes
        self._bracket = rf"{BLANK}\]" if region.is_list else ""
        self.end = re.compile(self._bracket + (f"{BLANK}(?:{closes})" if closes else ""))
        self._most = max(map(len, region.closes), default=0)

    def is_no_end(self, text: str) -> bool:
        """Whether no text that begins so is the end of a region."""
        if len(text) > self._most + _MOST_BLANKS:
            return True
        text = text.lstrip(" \n")
        if self._bracket and text.startswith("]"):
            text = text[1:].lstrip(" \n")
        elif self._bracket:
            return bool(text)
        return not any(close.startswith(text) for close in self._closes)


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        return False
