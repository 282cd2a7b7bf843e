"""Requests in OpenAI's shapes, checked. A field that is not served is refused by its path.

Field names follow OpenAI's specification; add_generation_prompt, allowed_token_ids,
continue_final_message, ignore_eos, min_p, min_tokens, prompt_logprobs, repetition_penalty,
return_token_ids, stop_token_ids, structured_outputs, top_k, truncate_prompt_tokens and
stream_options.continuous_usage_stats are vLLM's; speculation is Chorale's.
"""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Discriminator, Field, Tag

from engine.messages import Priority, SamplingParams
from server.api import errors
from server.api.chat_messages import Chat, Key, Prediction, Text, ToolChoice
from server.api.request_objects import RequestObject, parse_body, shown_key
from server.api.shapes import ResponseFormat, StructuredOutputs, shape_of
from server.inference import generation_request
from server.inference.generation_request import GenerationRequest
from server.shapes.shape import Shape
from server.tools.tool import ToolUse

_MAX_STOPS = 16
_MAX_STOP_BYTES = 256
_MAX_CHOICES = 16
"""The most answers to one prompt (`n`)."""
_MAX_ANSWERS = 128
"""The most answers of one request, and so the most prompts in a list."""
_MAX_BIASES = 1024
_MAX_LOGPROBS = 20
_MAX_PROMPT_TOKENS = 100_000

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "function_call": ("auto", "none"), "include_reasoning": (True, False),
    "length_penalty": (1,), "modalities": (["text"],), "parallel_tool_calls": (True, False),
    "priority": (0,), "reasoning_effort": ("none",), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "suffix": ("",), "tool_choice": ("auto", "none"),
    "top_logprobs": (0,), "verbosity": ("medium",),
    # No value is neutral: even an empty object switches web search on.
    "web_search_options": (),
}  # fmt: skip
"""Fields that are not served, with the values that ask for nothing; null always does."""


class _StreamOptions(RequestObject):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Field(max_length=_MAX_PROMPT_TOKENS)]
_TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
# A limit in characters; check() counts bytes.
_Stop = Annotated[str, Field(max_length=_MAX_STOP_BYTES)]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]


class _Request(RequestObject):
    """The fields that both kinds of completion share."""

    neutral = _NEUTRAL
    labels = frozenset({"metadata"})
    exact = frozenset({"structured_outputs"})
    model: str = Field(min_length=1, max_length=512)
    n: int = Field(1, ge=1, le=_MAX_CHOICES)
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
    min_tokens: int = Field(0, ge=0)
    allowed_token_ids: list[_TokenId] = Field(default_factory=list, max_length=_MAX_BIASES)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=0, le=_MAX_LOGPROBS)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    service_tier: Literal["auto", "default", "flex"] = "auto"
    speculation: Literal["auto", "off", "shared"] = "auto"
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_cache_key: Key = None
    safety_identifier: Key = None
    user: Key = None

    @property
    def asked_tokens(self) -> int | None:
        """Completion tokens of each answer; None for as many as the context leaves."""
        return self.max_tokens

    @property
    @abstractmethod
    def asked_prompts(self) -> generation_request.Chat | Sequence[str | list[int]]:
        """The prompts for the model."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to name beside the chosen one; None for no logprobs."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens the engine is to name at each place of the prompt."""
        return self.prompt_logprobs

    @property
    def predicted_text(self) -> str:
        """Text that the answers may turn out to be."""
        return ""

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def obfuscates(self) -> bool:
        """Whether the sizes of a stream's events are to be hidden."""
        return self.stream_options is not None and self.stream_options.include_obfuscation

    @property
    def counts_usage(self) -> bool:
        """Whether every chunk says how many tokens there have been."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def served_tier(self) -> str:
        return "flex" if self.service_tier == "flex" else "default"

    @functools.cached_property
    def shape(self) -> Shape | None:
        """The shape that every answer must have, or None. Raises ApiError, Invalid."""
        return shape_of(self.response_format, self.structured_outputs)

    def check(self) -> None:
        """Check what the types of the fields cannot express. Raises ApiError, Invalid."""
        if self.shape and self.allowed_token_ids:
            raise errors.invalid_request(
                "allowed_token_ids: answers of a given shape may need other tokens; send one only.",
                param="allowed_token_ids",
            )
        if len(self._stops) > _MAX_STOPS or any(
            not 0 < len(stop) <= _MAX_STOP_BYTES for stop in self._stops
        ):
            raise errors.invalid_request(
                f"stop takes at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_BYTES} bytes.",
                param="stop",
            )
        if self.truncate_prompt_tokens == 0:
            raise errors.invalid_request(
                "truncate_prompt_tokens: a prompt has to keep a token; send 1 or more, or -1 for "
                "what the context leaves.",
                param="truncate_prompt_tokens",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise errors.unsupported_parameter(
                "prompt_logprobs", "streams do not carry them; leave out stream or prompt_logprobs"
            )

    def for_model(self) -> GenerationRequest:
        """The request, independent of the shape that it came in."""
        return GenerationRequest(
            model=self.model,
            prompts=self.asked_prompts,
            sampling=self._sampling,
            max_tokens=self.asked_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=Priority.BATCH if self.service_tier == "flex" else Priority.INTERACTIVE,
            request_key=self.prompt_cache_key or self.safety_identifier or self.user,
            named_token_ids=self._named_token_ids,
            shape=self.shape,
            prediction="" if self.speculation == "off" else self.predicted_text,
            drafts=self.speculation != "off",
            shares_drafts=self.speculation == "shared",
        )

    @property
    def _named_token_ids(self) -> dict[str, int]:
        named = {shown_key("logit_bias", token): int(token) for token in self.logit_bias}
        for field in ("stop_token_ids", "allowed_token_ids"):
            named |= {f"{field}[{i}]": token for i, token in enumerate(getattr(self, field))}
        return named

    @property
    def _sampling(self) -> SamplingParams:
        """The sampling parameters for the engine; max_tokens is set later."""
        return SamplingParams(
            max_tokens=0,
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
            min_tokens=self.min_tokens,
            allowed_token_ids=tuple(self.allowed_token_ids),
            prompt_logprobs=self.num_prompt_logprobs,
        )

    @property
    def _stops(self) -> tuple[bytes, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop.encode() for stop in stops)


class ChatRequest(Chat, _Request):
    """The body of `/v1/chat/completions`."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MAX_LOGPROBS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    prediction: Prediction | None = None

    @property
    def predicted_text(self) -> str:
        return self.prediction.text if self.prediction else ""

    @property
    def asked_prompts(self) -> generation_request.Chat:
        return self.for_template(self.tool_use)

    @functools.cached_property
    def tool_use(self) -> ToolUse | None:
        """The tools, and which an answer may call; None without tools. Raises ApiError."""
        return self.use_of_tools(self.tool_choice, is_parallel=self.parallel_tool_calls)

    @property
    def asked_tokens(self) -> int | None:
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return max(given, default=None)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        self.check_chat()
        if self.tool_use and self.allowed_token_ids:
            raise errors.invalid_request(
                "allowed_token_ids: calls of tools may need other tokens; send one only.",
                param="allowed_token_ids",
            )
        if self.top_logprobs and not self.logprobs:
            raise errors.invalid_request(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )


def _form(prompt: Any) -> str:
    """The form of a prompt, judged by its first entry; errors then speak of that form only."""
    if not isinstance(prompt, list):
        return "a text"
    first = prompt[0] if prompt else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


_Prompt = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[_TokenIds, Tag("ids")]
    | Annotated[list[Text], Field(max_length=_MAX_ANSWERS), Tag("texts")]
    | Annotated[list[_TokenIds], Field(max_length=_MAX_ANSWERS), Tag("lists")],
    Discriminator(_form),
]


class CompletionRequest(_Request):
    """The body of `/v1/completions`."""

    neutral = _NEUTRAL | {"add_special_tokens": (True,)}
    max_tokens: int | None = Field(16, ge=0)
    prompt: _Prompt
    logprobs: int | None = Field(None, ge=0, le=_MAX_LOGPROBS)
    echo: bool = False

    @property
    def asked_prompts(self) -> Sequence[str | list[int]]:
        """Every prompt, each a text or its token ids."""
        is_one = _form(self.prompt) in ("a text", "ids")
        return cast(Sequence[str | list[int]], [self.prompt] if is_one else self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens to name at each place; an echo needs as many as the answer."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    def check(self) -> None:
        super().check()
        num_prompts = len(self.asked_prompts)
        if self.n * num_prompts > _MAX_ANSWERS:
            raise errors.invalid_request(
                f"n: {self.n} answers to each of {num_prompts} prompts are more than "
                f"{_MAX_ANSWERS}; send fewer prompts in a request.",
                param="n",
            )
        if self.stream and self.echo and self.logprobs is not None and self.n > 1:
            raise errors.unsupported_parameter(
                "echo",
                "streams of several answers have no prompt logprobs; leave out echo, logprobs or n",
            )


_Kind = TypeVar("_Kind", ChatRequest, CompletionRequest)


def parse_request(body: bytes, kind: type[_Kind]) -> _Kind:
    """A checked request of `kind`. Raises ApiError that names the parameter at fault."""
    asked = parse_body(body, kind)
    asked.check()
    return asked


class TextToTokenize(RequestObject):
    """The body of `/tokenize` with a text. Its fields are vLLM's."""

    model: Key = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ChatToTokenize(Chat):
    """The body of `/tokenize` with messages; the chat template adds the special tokens itself."""

    model: Key = None
    add_special_tokens: Literal[False] = False
    return_token_strs: bool = False


class TokensToDecode(RequestObject):
    """The body of `/detokenize`."""

    model: Key = None
    tokens: _TokenIds
