"""Answers taken apart as they come: content, reasoning, tool calls.

Arguments are passed on as the model wrote them, so the deltas of a call add up to its text. What
does not go on as a call is content, but an end that cuts a call off leaves nothing of it there: its
name and arguments so far are a part of a call, and the marks are left out. `server.tools.grammar`
enforces the same rules.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from server.tools.call_reader import CallPart, CallReader
from server.tools.response_template import CallRegion, ResponseTemplate

_BLANKS = " \t\r\n"


@dataclass(slots=True)
class Parsed:
    """Parts of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def append(self, other: "Parsed") -> None:
        """Add the parts that follow; the parts of one call become one."""
        self.content += other.content
        self.reasoning += other.reasoning
        for part in other.calls:
            self.add_call(part)

    def add_call(self, part: CallPart) -> None:
        """Add a part of a call to the call that it continues, or as the next."""
        if part.name is None and self.calls:
            self.calls[-1].arguments += part.arguments
        else:
            self.calls.append(CallPart(part.name, part.arguments))


class AnswerParser:
    """Takes one answer apart.

    tool_names: tools that may be called; with none, calls are content.   most_calls: further calls
    are content.   is_reasoning: the prompt ends in a reasoning part.
    is_constrained: content has a constraint, such as JSON, in which marks are text; so they count
    only before it begins. tokens: marks that are tokens of the model, of which nothing can be cut
    off. must_call: the answer has no content, only calls. Where it may call one tool only, it is a
    call of that tool even if its end cut the call's name off. num_calls: complete calls so far.
    is_whole: no region was left unfinished.

    Content before and after calls is joined by a line end, without the blanks beside the marks.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        tool_names: Collection[str] = (),
        most_calls: int | None = None,
        *,
        is_reasoning: bool = False,
        is_constrained: bool = False,
        must_call: bool = False,
        tokens: Collection[str] = (),
    ) -> None:
        self._is_constrained = is_constrained
        self._must_call = must_call
        self._tokens = tokens
        self._reasoning = template.reasoning
        self._calls = template.calls
        self._tool_names = tool_names
        self._most_calls = most_calls
        self._buffer = ""
        self._out = Parsed()
        self._blanks = self._opening = ""
        self._reader: CallReader | None = None
        self._num_regions = self._num_earlier_calls = 0
        self._is_at_start = not is_reasoning
        self._is_trimmed = self._has_content = self._is_cut = False
        self.is_reasoning = is_reasoning
        self.is_whole = True

    @property
    def num_calls(self) -> int:
        return self._num_earlier_calls + (self._reader.num_calls if self._reader else 0)

    @property
    def has_cut_call(self) -> bool:
        """Whether the last call is incomplete."""
        return self._reader is not None and self._reader.has_begun

    def push(self, text: str, *, final: bool = False, is_cut: bool = False) -> Parsed:
        """The parts that this text adds. Text is held while a mark may have begun at its end.

        is_cut: at the end, whether the answer might have gone on. What may begin a mark is left out
        then, and so is a call without its name.
        """
        self._buffer += text
        self._is_cut = is_cut
        self._out = Parsed()
        while self._go_on(final):
            pass
        if final:
            self._end()
        return self._out

    def _go_on(self, final: bool) -> bool:
        """Read on in the present region; whether it has ended."""
        if self._reader:
            return self._read_calls(self._reader, final)
        if self.is_reasoning:
            return self._read_reasoning(final)
        return self._read_content(final)

    def _read_content(self, final: bool) -> bool:
        calls = self._calls if self._may_call() else None
        if calls and calls.is_unopened:
            return self._read_beginning(calls, final)
        opens = calls.opens if calls else ()
        reasoning_opens = self._reasoning.opens if self._reasoning else ()
        marks = (*opens, *reasoning_opens)
        if self._is_constrained and self._has_begun_content(marks):
            marks = ()
        mark, start = _find(self._buffer, marks, self._begun(marks, final))
        self._say(self._buffer[:start])
        self._buffer = self._buffer[start + len(mark) :]
        if mark in opens:
            self._open_calls(mark)
        elif mark:
            self.is_reasoning = self._is_trimmed = True
            self._is_at_start = False
            self._blanks = ""
        return bool(mark)

    def _begun(self, marks: Sequence[str], final: bool) -> Sequence[str]:
        """The marks whose beginning, at the end of the text, is held and is no text so far."""
        if not final:
            return marks
        return [mark for mark in marks if mark not in self._tokens] if self._is_cut else ()

    def _has_begun_content(self, marks: Sequence[str]) -> bool:
        """Whether the text so far is no mark, and no beginning of one."""
        text = self._buffer.lstrip(_BLANKS)
        begins_mark = any(text.startswith(mark) or mark.startswith(text) for mark in marks)
        return self._has_content or not begins_mark

    def _may_call(self) -> bool:
        calls = self._calls
        if not calls or not self._tool_names or self.num_calls == self._most_calls:
            return False
        return self._is_at_start if calls.is_unopened else calls.repeats or not self._num_regions

    def _read_beginning(self, calls: CallRegion, final: bool) -> bool:
        """Decide whether the answer begins as a call that no mark opens."""
        for mark in (*calls.opens, ""):
            begin = mark + calls.beginning
            if self._buffer.startswith(begin):
                self._buffer = self._buffer[len(mark) :]
                self._open_calls(mark)
                return True
            if begin.startswith(self._buffer) and (self._is_cut or not final):
                return False
        self._is_at_start = False
        return True

    def _open_calls(self, mark: str) -> None:
        assert self._calls is not None
        most = None if self._most_calls is None else self._most_calls - self.num_calls
        # The blanks come back if it is no call after all.
        self._opening = self._blanks + mark
        self._reader = CallReader(self._calls, self._opening, self._tool_names, most)
        self._blanks = ""
        self._num_regions += 1

    def _read_calls(self, reader: CallReader, final: bool) -> bool:
        for part in reader.push(self._buffer, final=final and not self._is_cut):
            self._out.add_call(part)
        self._buffer = ""
        if not reader.is_over:
            self.is_whole = self.is_whole and not (final or reader.has_failed)
        if reader.has_failed and not reader.has_begun:
            # Another mark may follow the one that opened no call.
            opening = "" if reader.num_calls else self._opening
            self._close_calls(reader)
            self._say(opening)
            self._buffer = reader.raw[len(opening) :]
            return True
        if reader.is_over:
            self.is_whole = self.is_whole and reader.is_closed
            self._buffer = reader.rest
            self._close_calls(reader)
            return True
        return False

    def _close_calls(self, reader: CallReader) -> None:
        self._num_earlier_calls += reader.num_calls
        self._reader = None
        self._is_at_start = False
        self._is_trimmed = reader.num_calls > 0

    def _read_reasoning(self, final: bool) -> bool:
        assert self._reasoning is not None
        closes = self._reasoning.closes
        mark, start = _find(self._buffer, closes, self._begun(closes, final))
        self._out.reasoning += self._trimmed(self._buffer[:start])
        self._buffer = self._buffer[start + len(mark) :]
        if mark:
            self.is_reasoning = False
            self._is_trimmed = True
            self._blanks = ""
        return bool(mark)

    def _say(self, text: str) -> None:
        if self._must_call:
            return
        self._is_at_start = self._is_at_start and not text
        if text and self._num_regions and self._calls and self._calls.is_unopened:
            self.is_whole = False  # such a call is the whole answer
        is_next_part = self._is_trimmed and self._has_content
        text = self._trimmed(text)
        self._out.content += "\n" + text if is_next_part and text else text
        self._has_content = self._has_content or bool(text)

    def _trimmed(self, text: str) -> str:
        """The text without blanks beside marks; those at its end are held until more follows."""
        text = self._blanks + text
        if self._is_trimmed:
            text = text.lstrip(_BLANKS)
        kept = text.rstrip(_BLANKS)
        self._blanks = text[len(kept) :]
        self._is_trimmed = self._is_trimmed and not kept
        return kept

    def _end(self) -> None:
        if self.is_reasoning:
            self.is_whole = False
        elif self._must_call:
            has_calls = self.num_calls or self.has_cut_call
            if not has_calls and len(self._tool_names) == 1:
                self._out.add_call(CallPart(name=next(iter(self._tool_names))))
        elif not self._buffer:  # else it is what may begin a mark, and the blanks belong to it
            self._out.content += self._blanks


def _find(text: str, marks: Sequence[str], begun: Sequence[str]) -> tuple[str, int]:
    """The first of the marks in a text and its place; or "", and where one of `begun` may begin."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    at, _, mark = min(found, default=(len(text), 0, ""))
    for start in range(max(0, len(text) - max(map(len, begun), default=0)), at + 1):
        tail = text[start:]
        if any(len(other) > len(tail) and other.startswith(tail) for other in begun) and tail:
            return "", start
    return mark, at
