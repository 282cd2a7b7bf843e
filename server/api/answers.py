"""Answers in OpenAI's shapes: whole objects, chunks of a stream, usage.

Framing follows OpenAI's specification; `token_ids` and `prompt_token_ids` are vLLM's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine.messages import RequestOutput
from server.api.logprobs import LogprobsText, PromptLogprobs, extend
from server.text.json_object import JsonObject
from server.text.line_ends import one_line
from server.text.tokenizer import Detokenizer


class LastEvent(bytes):
    """The event that ends a stream."""


DONE = LastEvent(b"data: [DONE]\n\n")


@dataclass(slots=True)
class Part:
    """A part of one answer, or all of it. logprobs: in their OpenAI shape, None if there are none.

    finish_reason, stop_cause: how the answer ended, in OpenAI's words and in the engine's.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: JsonObject | None = None
    finish_reason: str | None = None
    stop_cause: str | None = None

    def append(self, other: "Part") -> None:
        """Add the part that follows this one."""
        self.text += other.text
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

    echo: the prompt's text if answers begin with it, else empty.   token_ids: None unless asked
    for.
    """

    echo: str = ""
    token_ids: Sequence[int] | None = None
    logprobs: PromptLogprobs | None = None


class Choice:
    """One of a request's answers, rendered in OpenAI's shape output by output."""

    def __init__(
        self, index: int, vocabulary: Sequence[bytes], is_chat: bool, prompt: ShownPrompt
    ) -> None:
        self.index = index
        self.is_chat = is_chat
        self.prompt = prompt
        self._detokenizer = Detokenizer(vocabulary)
        self._logprobs = LogprobsText(vocabulary, is_chat, len(prompt.echo))
        self._is_first_chunk = True

    def take(self, output: RequestOutput) -> Part:
        """The part that an output adds to the answer."""
        is_final = output.finish_reason is not None
        text = self._detokenizer.push(
            output.new_token_ids, final=is_final, cut_bytes=output.num_stop_bytes
        )
        # Rendered output by output: a whole answer at its end would hold up other requests.
        if output.prompt_logprobs and self.prompt.logprobs:
            self.prompt.logprobs.take(output.prompt_logprobs)
        logprobs = None
        if output.logprobs:
            logprobs = self._logprobs.render(output.new_token_ids, output.logprobs)
        reason = finish_reason(output) if is_final else None
        return Part(text, list(output.new_token_ids), logprobs, reason, output.stop_cause)

    def whole(self, part: Part) -> JsonObject:
        """The choice of an answer that is not streamed."""
        part = self._behind_prompt(part)
        choice = self._head(part)
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
        else:
            choice["text"] = part.text
        if self.prompt.token_ids is not None:
            choice["token_ids"] = part.token_ids
            choice["prompt_token_ids"] = list(self.prompt.token_ids)
        if not self.is_chat and self.listed_prompt is not None:
            choice["prompt_logprobs"] = self.listed_prompt
        return choice

    def chunk(self, part: Part) -> JsonObject:
        """The choice of one event of a stream; the first one also shows the prompt."""
        is_first, self._is_first_chunk = self._is_first_chunk, False
        part = self._behind_prompt(part) if is_first else part
        choice = self._head(part)
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if is_first else {}) | {"content": part.text}
        else:
            choice["text"] = part.text
        if self.prompt.token_ids is not None:
            choice["token_ids"] = part.token_ids
            if is_first:
                choice["prompt_token_ids"] = list(self.prompt.token_ids)
        return choice

    @property
    def listed_prompt(self) -> list[JsonObject | None] | None:
        """vLLM's `prompt_logprobs`; None where they were not asked for."""
        return self.prompt.logprobs.listed if self.prompt.logprobs else None

    def _behind_prompt(self, part: Part) -> Part:
        """The part with the echoed prompt before it."""
        echoed = self.prompt.logprobs.echoed if self.prompt.logprobs else None
        if echoed is None:
            return replace(part, text=self.prompt.echo + part.text)
        logprobs = {name: list(entries) for name, entries in echoed.items()}
        if part.logprobs is not None:
            extend(logprobs, part.logprobs)
        return replace(part, text=self.prompt.echo + part.text, logprobs=logprobs)

    def _head(self, part: Part) -> JsonObject:
        head = {
            "index": self.index,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
        }
        if part.finish_reason is not None:
            # OpenAI has no word for an exhausted budget.
            head["x_chorale"] = {"stop_cause": part.stop_cause}
        return head


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request, and the fields that each of its objects carries."""

    request_id: str
    model: str
    is_chat: bool
    created: int
    fingerprint: str
    service_tier: str

    @classmethod
    def of(
        cls, request_id: str, model: str, is_chat: bool, base_revision: str, service_tier: str
    ) -> "Answer":
        fingerprint = f"fp_{base_revision[:12]}"
        return cls(request_id, model, is_chat, int(time.time()), fingerprint, service_tier)

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
            "system_fingerprint": self.fingerprint,
            "service_tier": self.service_tier,
        }


def counts(output: RequestOutput) -> JsonObject:
    """OpenAI's usage object: the engine's counts up to this output."""
    return {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": output.num_completion_tokens,
        "total_tokens": output.num_prompt_tokens + output.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def usage(final: RequestOutput, cost_nanousd: int, price_version: int) -> JsonObject:
    """The counts of the whole request; Chorale's own fields are under `x_chorale`."""
    return counts(final) | {
        "x_chorale": {
            "cost_nanousd": cost_nanousd,
            "price_version": price_version,
            "adapter_digest": final.adapter_digest,
            "stop_cause": final.stop_cause,
        },
    }


def finish_reason(output: RequestOutput) -> str:
    """OpenAI's word for how the answer ended; a cancelled one has `stop`."""
    return "length" if output.finish_reason == "length" else "stop"


def event(data: object) -> bytes:
    """One server-sent event."""
    encoded = msgspec.json.encode(data)
    if not encoded.isascii():
        encoded = one_line(encoded.decode()).encode()
    return b"data: " + encoded + b"\n\n"
