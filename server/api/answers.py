"""Answers in OpenAI's formats: whole objects, chunks of a stream, usage.

Framing follows OpenAI's specification; `reasoning`, `token_ids` and `prompt_token_ids` are vLLM's,
`reasoning_content` is DeepSeek's.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import msgspec

from engine.wire.messages import RequestOutput
from server.api.logprobs import LogprobsText, PromptLogprobs, extend
from server.text.json_object import JsonObject
from server.text.line_ends import one_line
from server.text.tokenizer import Detokenizer
from server.tools.call_reader import CallPart
from server.tools.parser import AnswerParser, Parsed


class LastEvent(bytes):
    """The event that ends a stream."""


DONE = LastEvent(b"data: [DONE]\n\n")


@dataclass(slots=True)
class Part:
    """A part of one answer, or all of it. logprobs: in their OpenAI form, None if there are none.

    said: its text, taken apart.
    finish_reason, stop_cause: how the answer ended, in OpenAI's words and in the engine's.
    """

    said: Parsed = field(default_factory=Parsed)
    token_ids: list[int] = field(default_factory=list)
    logprobs: JsonObject | None = None
    finish_reason: str | None = None
    stop_cause: str | None = None

    def append(self, other: "Part") -> None:
        """Add the part that follows this one."""
        self.said.append(other.said)
        self.token_ids += other.token_ids
        self.finish_reason = other.finish_reason
        self.stop_cause = other.stop_cause
        if self.logprobs is None:
            self.logprobs = other.logprobs
        elif other.logprobs is not None:
            extend(self.logprobs, other.logprobs)


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt as its answers show it.

    echo: the text that answers begin with, the prompt's or its last message's; empty for none.
    token_ids: None unless asked for.
    """

    echo: str = ""
    token_ids: list[int] | None = None
    logprobs: PromptLogprobs | None = None


@dataclass(slots=True, eq=False)
class Choice:
    """One of a request's answers, rendered in OpenAI's format output by output.

    parser: None for answers that have neither calls nor reasoning.   shown: texts of its marks that
    are special tokens.   not_enforced: paths of what the request demands and nothing enforces.
    shows_reasoning, shows_stop: whether the client wants to have the reasoning, and the text of the
    token that ends the answer.   names_ids: whether logprobs name tokens by their ids.
    """

    index: int
    vocabulary: Sequence[bytes]
    is_chat: bool
    prompt: ShownPrompt
    parser: AnswerParser | None = None
    shown: Mapping[int, bytes] = field(default_factory=dict)
    not_enforced: Sequence[str] = ()
    _: KW_ONLY
    shows_reasoning: bool = True
    shows_stop: bool = False
    names_ids: bool = False
    num_reasoning_tokens: int = field(default=0, init=False)
    is_first_chunk: bool = field(default=True, init=False)
    _num_calls: int = field(default=0, init=False)
    _detokenizer: Detokenizer = field(init=False)
    _logprobs: LogprobsText = field(init=False)

    def __post_init__(self) -> None:
        num_echoed, as_ids = len(self.prompt.echo), self.names_ids
        self._detokenizer = Detokenizer(self.vocabulary, self.shown)
        self._logprobs = LogprobsText(self.vocabulary, self.is_chat, num_echoed, as_ids=as_ids)

    def take(self, output: RequestOutput) -> Part:
        """The part that an output adds to the answer."""
        is_final = output.finish_reason is not None
        said = self._said(output)
        # Rendered output by output: a whole answer at its end would hold up other requests.
        if output.prompt_logprobs and self.prompt.logprobs:
            self.prompt.logprobs.take(output.prompt_logprobs)
        logprobs = None
        if output.logprobs:
            logprobs = self._logprobs.render(output.new_token_ids, output.logprobs)
        reason = None
        if is_final:  # in OpenAI's words; a cancelled answer has `stop`
            reason = "length" if output.finish_reason == "length" else "stop"
        return Part(said, list(output.new_token_ids), logprobs, reason, output.stop_cause)

    @property
    def is_plain(self) -> bool:
        """Whether its chunks but the first and the last differ in their text alone, as long as no
        logprobs come with them.
        """
        return self.parser is None and self.prompt.token_ids is None

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text that tokens add to a plain answer that goes on."""
        return self._detokenizer.push(token_ids)

    def _cut_bytes(self, output: RequestOutput) -> int:
        """Bytes at the end that are no text of the answer."""
        if self.shows_stop or output.stop_cause not in ("eos", "stop_token"):
            return output.num_stop_bytes
        num_last_bytes = len(self._detokenizer.bytes_of(output.new_token_ids[-1:]))
        return max(output.num_stop_bytes, num_last_bytes)

    def _said(self, output: RequestOutput) -> Parsed:
        """The text of an output's tokens, taken apart; tokens of a reasoning part are counted."""
        token_ids, cut_bytes = output.new_token_ids, self._cut_bytes(output)
        final, is_cut = output.finish_reason is not None, output.stop_cause != "eos"
        parser = self.parser
        if parser is None:
            return Parsed(self._detokenizer.push(token_ids, final=final, cut_bytes=cut_bytes))
        said = Parsed()
        # Token by token; those that the cut touches at once.
        first = len(token_ids)
        while first and len(self._detokenizer.bytes_of(token_ids[first:])) < cut_bytes:
            first -= 1
        groups = [*([i] for i in token_ids[:first]), token_ids[first:]]
        for number, group in enumerate(groups, start=1):
            is_end = number == len(groups)
            cut = cut_bytes if is_end else 0
            text = self._detokenizer.push(group, final=final and is_end, cut_bytes=cut)
            was_reasoning = parser.is_reasoning
            said.append(parser.push(text, final=final and is_end, is_cut=is_cut))
            if was_reasoning or parser.is_reasoning:
                self.num_reasoning_tokens += len(group)
        if not self.shows_reasoning:
            said.reasoning = ""
        return said

    def whole(self, part: Part) -> JsonObject:
        """The choice of an answer that is not streamed."""
        part = self._behind_prompt(part)
        choice = self._head(part)
        if self.is_chat:
            choice["message"] = self._message(part.said)
        else:
            choice["text"] = part.said.content
            choice["prompt_token_ids"] = self.prompt.token_ids
            choice["prompt_logprobs"] = self.listed_prompt
        return choice

    def chunk(self, part: Part) -> JsonObject:
        """The choice of one event of a stream; the first one also shows the prompt."""
        is_first, self.is_first_chunk = self.is_first_chunk, False
        part = self._behind_prompt(part) if is_first else part
        if self.is_chat:
            delta = ({"role": "assistant"} if is_first else {}) | self._delta(part.said)
            choice = self._head(part) | {"delta": delta}
        else:
            choice = self._head(part) | {"text": part.said.content}
            choice["prompt_token_ids"] = self.prompt.token_ids if is_first else None
        return choice

    def is_silent(self, part: Part) -> bool:
        """Whether a part shows nothing: its text may be the beginning of a mark."""
        said = part.said
        has_text = bool(said.content or said.reasoning or said.calls)
        shows = has_text or part.finish_reason or part.logprobs or self.prompt.token_ids is not None
        return self.parser is not None and not shows

    def _message(self, said: Parsed) -> JsonObject:
        has_text = bool(said.content or not said.calls)
        message: JsonObject = {"role": "assistant"}
        message["content"] = said.content if has_text else None
        message["reasoning"] = message["reasoning_content"] = said.reasoning or None
        if said.calls:
            calls = enumerate(said.calls)
            message["tool_calls"] = [_shown_call(i, call, is_whole=True) for i, call in calls]
        return message | {"refusal": None}

    def _delta(self, said: Parsed) -> JsonObject:
        if self.parser is None:
            return {"content": said.content}
        delta: JsonObject = {"content": said.content} if said.content else {}
        if said.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = said.reasoning
        for call in said.calls:
            self._num_calls += call.name is not None
            shown = _shown_call(self._num_calls - 1, call, is_whole=False)
            delta.setdefault("tool_calls", []).append(shown)
        return delta

    @property
    def listed_prompt(self) -> list[JsonObject | None] | None:
        """vLLM's `prompt_logprobs`; None where they were not asked for."""
        return self.prompt.logprobs.listed if self.prompt.logprobs else None

    def _behind_prompt(self, part: Part) -> Part:
        """The part with the echoed prompt before it."""
        echoed = self.prompt.logprobs.echoed if self.prompt.logprobs else None
        if echoed is None:
            return self._with_echo(part) if self.prompt.echo else part
        logprobs = {name: list(entries) for name, entries in echoed.items()}
        if part.logprobs is not None:
            extend(logprobs, part.logprobs)
        return replace(self._with_echo(part), logprobs=logprobs)

    def _with_echo(self, part: Part) -> Part:
        return replace(part, said=replace(part.said, content=self.prompt.echo + part.said.content))

    def _head(self, part: Part) -> JsonObject:
        reason = part.finish_reason
        head: JsonObject = {"index": self.index, "logprobs": part.logprobs, "finish_reason": reason}
        head["token_ids"] = None if self.prompt.token_ids is None else part.token_ids
        parser = self.parser
        if reason == "stop" and parser and parser.num_calls and not parser.has_cut_call:
            head["finish_reason"] = "tool_calls"
        if part.finish_reason is not None:
            # OpenAI has no word for an exhausted budget.
            head["x_chorale"] = {"stop_cause": part.stop_cause}
            if self.not_enforced:
                head["x_chorale"]["not_enforced"] = self.not_enforced
        return head


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request, and the fields that each of its objects carries."""

    request_id: str
    model: str
    is_chat: bool
    base_revision: str
    service_tier: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}"

    def whole(self, choices: Sequence[JsonObject], usage: JsonObject) -> JsonObject:
        """The answer that is not streamed."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage}

    def chunk(self, choice: JsonObject) -> JsonObject:
        """One event of a stream."""
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.base_revision[:12]}",
            "service_tier": self.service_tier,
        }


def _shown_call(index: int, call: CallPart, *, is_whole: bool) -> JsonObject:
    """A call, or a part of one, in OpenAI's format."""
    function = {"arguments": call.arguments}
    shown: JsonObject = {} if is_whole else {"index": index}
    if call.name is not None:
        shown |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        function = {"name": call.name, **function}
    return {**shown, "function": function}


def counts(output: RequestOutput, num_reasoning_tokens: int | None = None) -> JsonObject:
    """OpenAI's usage object: the engine's counts up to this output.

    num_reasoning_tokens: None for models without reasoning parts.
    """
    details = {
        "accepted_prediction_tokens": output.num_accepted_tokens,
        "rejected_prediction_tokens": output.num_rejected_tokens,
    }
    if num_reasoning_tokens is not None:
        details["reasoning_tokens"] = num_reasoning_tokens
    return {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": output.num_completion_tokens,
        "total_tokens": output.num_prompt_tokens + output.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        "completion_tokens_details": details,
    }


def usage(
    final: RequestOutput, counts: JsonObject, cost_nanousd: int, price_version: int
) -> JsonObject:
    """The counts of the whole request; Chorale's own fields are under `x_chorale`."""
    return counts | {
        "x_chorale": {
            "cost_nanousd": cost_nanousd,
            "price_version": price_version,
            "adapter_digest": final.adapter_digest,
            "stop_cause": final.stop_cause,
        },
    }


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json_text(data) + b"\n\n"


def json_text(data: object) -> bytes:
    """JSON as events have it, on one line."""
    encoded = msgspec.json.encode(data)
    return encoded if encoded.isascii() else one_line(encoded.decode()).encode()
