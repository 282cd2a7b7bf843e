"""OpenAI's shapes: requests checked and refused by name, answers and chunks rendered.

Field names and framing follow OpenAI's specification; `return_token_ids` is vLLM's.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.messages import RequestOutput, SamplingParams
from server import errors
from server.errors import ApiError

DONE = b"data: [DONE]\n\n"

_MAX_STOPS = 16
_MAX_STOP_BYTES = 256
_MAX_MESSAGES = 2048

# What may be sent without being served: values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none",), "functions": ([],),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logit_bias": ({},), "store": (False,), "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",), "verbosity": ("medium",),
}  # fmt: skip
# Labels of the caller's own: accepted, and nothing depends on them.
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]

    def plain(self) -> dict[str, str]:
        """As chat templates want it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _Request(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = Field(min_length=1, max_length=512)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Raises ApiError for stops that cannot be."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        encoded = tuple(stop.encode() for stop in stops)
        if len(encoded) > _MAX_STOPS or any(not 0 < len(s) <= _MAX_STOP_BYTES for s in encoded):
            raise errors.invalid_request(
                f"stop takes at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_BYTES} bytes.",
                param="stop",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=None if self.seed is None else self.seed % 2**64,
            stop=encoded,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class ChatRequest(_Request):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def asked_tokens(self) -> int | None:
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return max(given, default=None)


class CompletionRequest(_Request):
    max_tokens: int | None = Field(16, ge=1)
    prompt: str | list[Annotated[int, Field(ge=0)]] | list[str]


def parse_request(body: bytes, kind: type[ChatRequest] | type[CompletionRequest]) -> Any:
    """A checked request of `kind`. Raises ApiError that names the parameter at fault."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise errors.invalid_request("The body is not valid JSON.") from None
    if not isinstance(values, dict):
        raise errors.invalid_request("The body must be a JSON object.")
    served = {name: v for name, v in values.items() if name in kind.model_fields}
    for name in values.keys() - served.keys() - _LABELS:
        value = values[name]
        if value is not None and not any(_equal(value, n) for n in _NEUTRAL.get(name, ())):
            raise errors.unsupported_parameter(name)
    try:
        return kind.model_validate_json(
            json.dumps({k: v for k, v in served.items() if v is not None})
        )
    except ValidationError as error:
        raise _fault(error) from None


def _equal(value: Any, neutral: Any) -> bool:
    """Equal, and a bool only to a bool."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _fault(error: ValidationError) -> ApiError:
    """The deepest of the faults: for a union, pydantic lists every branch that did not fit."""
    deepest = max(error.errors(), key=lambda fault: len(fault["loc"]))
    path = ""
    for part in deepest["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _FIELDS:
            path += f".{part}" if path else part
    return errors.invalid_request(f"{path}: {deepest['msg']}", param=path or None)


# What may stand in a fault's location; the rest of it names branches of unions.
_FIELDS = frozenset(
    name
    for model in (ChatRequest, CompletionRequest, _Message, _TextPart, _StreamOptions)
    for name in model.model_fields
)


# ---- answers ----


@dataclass(frozen=True, slots=True)
class Answer:
    """What every object of one answer carries. digest: of the adapter that was applied."""

    request_id: str
    model: str
    is_chat: bool
    created: int
    fingerprint: str

    @classmethod
    def of(cls, request_id: str, model: str, is_chat: bool, base_revision: str) -> "Answer":
        return cls(request_id, model, is_chat, int(time.time()), f"fp_{base_revision[:12]}")

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}"

    def whole(
        self,
        text: str,
        finish_reason: str,
        usage: dict[str, Any],
        token_ids: Sequence[int] | None,
        prompt_token_ids: Sequence[int] | None,
    ) -> dict[str, Any]:
        """The answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        if token_ids is not None:
            choice["token_ids"] = list(token_ids)
            choice["prompt_token_ids"] = list(prompt_token_ids or ())
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage}

    def chunk(
        self,
        text: str,
        *,
        finish_reason: str | None = None,
        token_ids: Sequence[int] | None = None,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """One event of a stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if is_first else {}) | {"content": text}
        else:
            choice["text"] = text
        if token_ids is not None:
            choice["token_ids"] = list(token_ids)
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(final: RequestOutput, cost_nanousd: int, price_version: int) -> dict[str, Any]:
    """OpenAI's usage object from the engine's counts; what is ours is under one key."""
    return {
        "prompt_tokens": final.num_prompt_tokens,
        "completion_tokens": final.num_completion_tokens,
        "total_tokens": final.num_prompt_tokens + final.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": final.num_cached_tokens},
        "x_chorale": {
            "cost_nanousd": cost_nanousd,
            "price_version": price_version,
            "adapter_digest": final.adapter_digest,
            "stop_cause": final.stop_cause,
        },
    }


def finish_reason(final: RequestOutput) -> str:
    """OpenAI's word for how it ended: a cancelled answer stopped."""
    return "length" if final.finish_reason == "length" else "stop"


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
