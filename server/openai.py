"""Requests in OpenAI's shapes: checked, and what is not served refused by name.

Field names follow OpenAI's specification; top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos and return_token_ids are vLLM's.
"""

import json
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from engine.messages import SamplingParams
from server import errors
from server.errors import ApiError
from server.json_text import check_json

_MAX_STOPS = 16
_MAX_STOP_BYTES = 256
_MAX_MESSAGES = 2048
_MAX_ANSWERS = 16
_MAX_BIASES = 1024
_MAX_LOGPROBS = 20
_MAX_KEY_CHARACTERS = 512
_MAX_PARTS = 64
# Of a text, in the caller's bytes: what is longer than the whole body may be is cut there.
_MAX_TEXT_CHARACTERS = 4 << 20
_MAX_PROMPT_TOKENS = 100_000
# Of a name that is refused: an error is no echo.
_MAX_SHOWN_CHARACTERS = 64
_BATCH_PRIORITY = 1

# What may be sent without being served: values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "top_logprobs": (0,), "echo": (False,), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none",), "functions": ([],), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
    "reasoning_effort": ("none",), "verbosity": ("medium",),
}  # fmt: skip
# A label of the caller's own: accepted, and nothing depends on it.
_LABELS = {"metadata"}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


_Text = Annotated[str, Field(max_length=_MAX_TEXT_CHARACTERS)]


class _TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: _Text


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text | Annotated[list[_TextPart], Field(max_length=_MAX_PARTS)]

    def plain(self) -> dict[str, str]:
        """As chat templates want it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Key = Annotated[str | None, Field(max_length=_MAX_KEY_CHARACTERS)]
# Bytes are counted in check().
_Stop = Annotated[str, Field(max_length=_MAX_STOP_BYTES)]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


class _Request(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str = Field(min_length=1, max_length=512)
    n: int = Field(1, ge=1, le=_MAX_ANSWERS)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0, allow_inf_nan=False)
    logit_bias: dict[_TokenName, _Bias] = Field(default_factory=dict, max_length=_MAX_BIASES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: list[_TokenId] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    service_tier: Literal["auto", "default", "flex"] = "auto"
    prompt_cache_key: _Key = None
    safety_identifier: _Key = None
    user: _Key = None

    @property
    def request_key(self) -> str | None:
        """What requests that belong together share: they get one version of a weighted alias."""
        return self.prompt_cache_key or self.safety_identifier or self.user

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Of the likeliest tokens beside the chosen one; None for no logprobs at all."""

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def priority(self) -> int:
        """AddRequest's: who asks for the flexible tier can wait."""
        return _BATCH_PRIORITY if self.service_tier == "flex" else 0

    @property
    def served_tier(self) -> str:
        return "flex" if self.service_tier == "flex" else "default"

    def check(self) -> None:
        """What fields alone do not say. Raises ApiError."""
        if len(self._stops) > _MAX_STOPS or any(
            not 0 < len(stop) <= _MAX_STOP_BYTES for stop in self._stops
        ):
            raise errors.invalid_request(
                f"stop takes at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_BYTES} bytes.",
                param="stop",
            )

    def check_token_ids(self, vocabulary_size: int) -> None:
        """Raises ApiError for an id that no token has."""
        named = {
            "logit_bias": [int(token) for token in self.logit_bias],
            "stop_token_ids": self.stop_token_ids,
        }
        for param, token_ids in named.items():
            if max(token_ids, default=0) >= vocabulary_size:
                raise errors.unknown_token_id(vocabulary_size, param=param)

    def sampling(self, max_tokens: int) -> SamplingParams:
        """As the engine wants it."""
        return SamplingParams(
            max_tokens=max_tokens,
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            logprobs=self.num_logprobs,
            seed=None if self.seed is None else self.seed % 2**64,
            stop=self._stops,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    @property
    def _stops(self) -> tuple[bytes, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop.encode() for stop in stops)


class ChatRequest(_Request):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MAX_LOGPROBS)

    @property
    def asked_tokens(self) -> int | None:
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return max(given, default=None)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise errors.invalid_request(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )


class CompletionRequest(_Request):
    max_tokens: int | None = Field(16, ge=1)
    prompt: (
        _Text
        | Annotated[list[_TokenId], Field(max_length=_MAX_PROMPT_TOKENS)]
        | Annotated[list[_Text], Field(max_length=_MAX_PARTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=_MAX_LOGPROBS)
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise errors.unsupported_parameter(
                "echo", "logprobs of the prompt are not computed; leave out echo or logprobs"
            )


def parse_request(body: bytes, kind: type[ChatRequest] | type[CompletionRequest]) -> Any:
    """A checked request of `kind`. Raises ApiError that names the parameter at fault."""
    try:
        # Not json.loads: that lets half a surrogate pair through, which no answer can hold.
        values = from_json(check_json(body), allow_inf_nan=False)
    except ValueError:
        raise errors.invalid_request("The body is not valid JSON.") from None
    if not isinstance(values, dict):
        raise errors.invalid_request("The body must be a JSON object.")
    served = {name: v for name, v in values.items() if name in kind.model_fields}
    for name in values.keys() - served.keys() - _LABELS:
        value = values[name]
        if value is not None and not any(_equal(value, n) for n in _NEUTRAL.get(name, ())):
            raise errors.unsupported_parameter(name[:_MAX_SHOWN_CHARACTERS])
    try:
        asked = kind.model_validate_json(
            json.dumps({k: v for k, v in served.items() if v is not None})
        )
    except ValidationError as error:
        raise _fault(error) from None
    asked.check()
    return asked


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
        elif path == "logit_bias":
            break  # what follows is the caller's own key
        elif part in _FIELDS:
            path += f".{part}" if path else part
    return errors.invalid_request(f"{path}: {deepest['msg']}", param=path or None)


# What may stand in a fault's location; the rest of it names branches of unions.
_FIELDS = frozenset(
    name
    for model in (ChatRequest, CompletionRequest, _Message, _TextPart, _StreamOptions)
    for name in model.model_fields
)
