"""One answer as server-sent events, each written in the moment of its output."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from uuid import uuid4

from engine.wire.messages import RequestOutput
from server.api import answers
from server.api.answers import Answer, Choice, Part
from server.api.padding import Padding
from server.text.json_object import JsonObject
from server.tools.parser import Parsed

Usage = Callable[[RequestOutput], JsonObject]


@dataclass(slots=True, eq=False)
class AnswerEvents:
    """Turns the outputs of a request into events, and gives each to `write`.

    usage_so_far: gives the usage of every event; None where events have none.
    usage: gives that of an event of its own at the end; None where there is no such event.
    """

    answer: Answer
    choices: Sequence[Choice]
    padding: Padding
    write: Callable[[bytes], None]
    _: KW_ONLY
    usage_so_far: Usage | None
    usage: Usage | None
    _frames: "dict[int, _Frame]" = field(default_factory=dict, init=False)

    def take(self, output: RequestOutput) -> None:
        choice, frame = self.choices[output.index], self._frames.get(output.index)
        if frame is not None and _adds_only_text(output):
            self.write(frame.around(choice.text_of(output.new_token_ids)))
            return
        part = choice.take(output)
        # Padded, a step without an event would tell what it was silent about.
        is_shown = self.usage_so_far or self.padding or not choice.is_silent(part)
        if is_shown and not output.is_of_prompt:
            self.write(self._event(choice, part, output))
            if frame is None and choice.is_plain and not (self.padding or self.usage_so_far):
                event = self._event(choice, Part(Parsed(_MARK)), output)
                self._frames[output.index] = _Frame.of(event)
        if output.is_last:
            self._end(output)

    def _end(self, output: RequestOutput) -> None:
        if self.usage is not None:
            event = answers.event(self.answer.usage_chunk(self.usage(output)))
            self.write(self.padding.part(event))
        self.write(self.padding.last(answers.DONE))

    def _event(self, choice: Choice, part: Part, output: RequestOutput) -> bytes:
        is_first = choice.is_first_chunk
        chunk = self.answer.chunk(choice.chunk(part))
        if is_first and choice.is_chat:
            chunk["prompt_token_ids"] = choice.prompt.token_ids
        # Where usage comes at the end, every event has the key, and null.
        if self.usage_so_far is not None:
            chunk["usage"] = self.usage_so_far(output)
        elif self.usage is not None:
            chunk["usage"] = None
        return self.padding.part(answers.event(chunk))


def _adds_only_text(output: RequestOutput) -> bool:
    is_under_way = bool(output.new_token_ids) and output.finish_reason is None
    return is_under_way and not output.logprobs and not output.prompt_logprobs


_MARK = uuid4().hex
"""A text that no event has by chance."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The bytes before and after the text, in events of an answer that differ in nothing else."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, event: bytes) -> "_Frame":
        """The frame of the event whose text is `_MARK`."""
        return cls(*event.split(answers.json_text(_MARK)))

    def around(self, text: str) -> bytes:
        return b"%b%b%b" % (self.before, answers.json_text(text), self.after)
