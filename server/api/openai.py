"""Requests in OpenAI's formats, checked. A field that is not served is refused by its path.

Field names follow OpenAI's specification, and vLLM's for what that does not have; speculation is
Chorale's. docs/reference/request-fields.md lists them all.
"""

import functools
from abc import abstractmethod
from collections.abc import MutableSequence, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Discriminator, Field, Tag

from engine.wire.messages import Priority, SamplingParams
from registry.errors import Invalid
from server.api import errors
from server.api.chat_messages import Chat, Key, Prediction, Text, ToolChoice
from server.api.field_types import (
    AllowedTokenIds,
    BadWords,
    LogitBias,
    Stops,
    TokenId,
    TokenIds,
)
from server.api.request_objects import RequestObject, parse_body, shown_key
from server.api.structured_outputs import ResponseFormat, StructuredOutputs, constraint_of
from server.constraints.constraint import Constraint
from server.inference import generation_request
from server.inference.generation_request import GenerationRequest
from server.tools.tool import ToolUse

_MAX_CHOICES = 16
"""The most answers to one prompt (`n`)."""
_MAX_ANSWERS = 128
"""The most answers of one request, and so the most prompts in a list."""
_MAX_LOGPROBS = 20
_MAX_GIVEN_LOGPROBS = 128

_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    # OpenAI's. Even an empty object switches web search on.
    "audio": (), "background": (False,), "function_call": ("auto", "none"), "functions": ([],),
    "modalities": (["text"],), "moderation": (), "store": (False,), "suffix": ("",),
    "web_search_options": (),
    # vLLM's.
    "best_of": (1,), "cache_salt": (), "chat_template": (), "detokenize": (True,),
    "documents": ([],), "ec_transfer_params": ({},), "guided_choice": ([],), "guided_grammar": (),
    "guided_json": (), "guided_regex": (), "kv_transfer_params": ({},), "logits_processors": ([],),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},), "priority": (0,), "prompt_embeds": (),
    "repetition_detection": ({},), "request_id": (), "return_prompt_text": (False,),
    "stream_interval": (1,), "vllm_xargs": ({},),
    # Other servers'.
    "cache_prompt": (True,), "ebnf": (), "lora_path": (), "min_new_tokens": (0,), "mirostat": (0,),
    "no_stop_trim": (False,), "reasoning": ({}, {"exclude": False}), "regex": (),
    "repeat_penalty": (1,), "return_hidden_states": (False,), "separate_reasoning": (True,),
    "stream_reasoning": (True,), "tfs_z": (1,), "thinking": (), "thinking_budget": (),
    "top_a": (0,), "transforms": ([],), "typical_p": (1,),
}  # fmt: skip
"""Fields that are known and not served by either endpoint, with the values that ask for nothing."""

_WITHOUT_EFFECT = {
    "metadata": "it is for your own use",
    "prompt_cache_retention": "the prefix cache keeps what is used most, for as long as it can",
    "spaces_between_special_tokens": "a text is the bytes of its tokens, with nothing between them",
    "usage": "every answer has its usage, and a stream by stream_options",
    "verbosity": "it is a hint to models that were trained on it; no chat template is given it",
}
_BEAM_FIELDS = frozenset({
    "model", "n", "max_tokens", "max_completion_tokens", "prompt", "echo", "logprobs",
    "top_logprobs", "prompt_logprobs", "stop_token_ids", "ignore_eos", "return_token_ids",
    "return_tokens_as_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "service_tier", "use_beam_search",
    "length_penalty", "prompt_cache_key", "safety_identifier", "user", "include_reasoning",
} | Chat.model_fields.keys() - {"tools"})  # fmt: skip
"""Fields that a beam search heeds. Others would have no effect, and are refused beside it."""
_BEAM_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0,), "top_k": (-1,), "speculation": ("off",), "tool_choice": ("none",),
    "parallel_tool_calls": (False,),
}  # fmt: skip
"""Values beside the default that ask for nothing in a beam search."""


class _StreamOptions(RequestObject):
    """Options of a stream.

    include_usage: whether a chunk before the end has the usage.
    include_obfuscation: whether events are padded, so that their sizes say less of the text.
    continuous_usage_stats: whether, with include_usage, every chunk has the usage so far.
    """

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class _Request(RequestObject):
    """The fields that both kinds of completion share.

    model: a base model, a route, or an adapter as `name`, `name@alias`, `name@3` or `owner/name`.
    n: how many answers each prompt gets.
    max_tokens: the most tokens of an answer; null for as many as the context has room for.
    temperature: 0 always takes the likeliest token, and higher values spread the choice.
    top_p: only the likeliest tokens that together have this probability can be chosen.
    top_k: only so many of the likeliest tokens can be chosen; 0 or -1 for all.
    min_p: only tokens at least this share as likely as the likeliest one can be chosen.
    presence_penalty: subtracted from the logit of each token that the answer has already.
    frequency_penalty: subtracted from the logit of a token for each time that the answer has it.
    repetition_penalty: weakens tokens of the prompt and of the answer if it is above 1.
    logit_bias: what to add to the logits of tokens, by token id.
    seed: fixes the random numbers of the tokens; null for new ones in each request.
    stop: texts that end an answer, without them; 256 bytes each and 4,096 bytes in all at most.
    stop_token_ids: tokens that end an answer, without their text.
    include_stop_str_in_output: whether the text or the token that ended an answer is part of it.
    bad_words: texts that an answer must not have, each also with a space before it.
    skip_special_tokens: whether the text of an answer is without the model's special tokens.
    ignore_eos: whether the model's own end of an answer does not end it.
    min_tokens: tokens that an answer has before it may end.
    allowed_token_ids: the only tokens that can be chosen; empty for all.
    truncate_prompt_tokens: keeps only so many tokens of the prompt; -1 keeps what the context has
    room for, null keeps all.
    truncation_side: whether these are the last tokens, `left`, or the first, `right`; needs
    truncate_prompt_tokens.
    prompt_logprobs: how many of the likeliest tokens to name at each place of the prompt; null for
    none; not in a stream.
    logprob_token_ids: tokens whose logprobs to name at each place of the answer, in place of the
    likeliest ones; needs logprobs.
    stream: whether the answer comes in parts, as server-sent events.
    stream_options: what a stream says beside the text.
    return_token_ids: whether the answer has the token ids of prompt and answers.
    return_tokens_as_token_ids: whether logprobs name tokens by id, as `token_id:N`, not by text.
    service_tier: `flex` lets other requests go first; `auto` and `default` are the same.
    use_beam_search: whether the answers are the n likeliest ones as a whole, not sampled.
    length_penalty: only with use_beam_search: an answer's score is the sum of its logprobs over the
    number of its tokens and the prompt's, to the power of this; above 1 favours long answers.
    speculation: `off` drafts no tokens; `shared` also drafts from your other answers that said so.
    response_format: the form of the answers, OpenAI's field; one of this and structured_outputs.
    structured_outputs: the form of the answers, vLLM's field.
    prompt_cache_key, safety_identifier, user: a label; requests with the same one get the same
    version of an alias with a canary and the same model of a route of weights. The first that is
    given of these three counts.
    """

    not_served = _NOT_SERVED
    without_effect = _WITHOUT_EFFECT
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
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops = None
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=64)
    include_stop_str_in_output: bool = False
    bad_words: BadWords = Field(default_factory=list)
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    allowed_token_ids: AllowedTokenIds = Field(default_factory=list)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: int | None = Field(None, ge=0, le=_MAX_LOGPROBS)
    logprob_token_ids: list[TokenId] = Field(default_factory=list, max_length=_MAX_GIVEN_LOGPROBS)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    service_tier: Literal["auto", "default", "flex"] = "auto"
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-10.0, le=10.0, allow_inf_nan=False)
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
    def options(self) -> _StreamOptions:
        """The options of a stream, by default none."""
        return self.stream_options or _StreamOptions()

    @property
    def served_tier(self) -> str:
        return "flex" if self.service_tier == "flex" else "default"

    @functools.cached_property
    def constraint(self) -> Constraint | None:
        """The constraint that every answer must have, or None. Raises Invalid."""
        return constraint_of(self.response_format, self.structured_outputs)

    def check(self) -> None:
        """Check what the types of the fields cannot express. Raises Invalid."""
        if self.constraint:
            self._refuse_choices_of_tokens("answers of a given shape")
        if self.allowed_token_ids and self.bad_words:
            self._refuse_choices_of_tokens("answers without bad_words")
        if self.truncate_prompt_tokens == 0:
            why = (
                "send 1 or more for a prompt that keeps a token, or -1 for what the context leaves"
            )
            raise Invalid.at("truncate_prompt_tokens", why)
        if self.truncation_side == "right" and self.truncate_prompt_tokens is None:
            raise Invalid.at("truncation_side", "it needs truncate_prompt_tokens")
        if self.logprob_token_ids and self.num_logprobs is None:
            why = "the answer has no logprobs; ask for logprobs, too"
            raise Invalid.at("logprob_token_ids", why)
        if self.use_beam_search:
            self._check_beams()
        elif self.length_penalty != 1:
            raise errors.unsupported_parameter(
                "length_penalty", "only a beam search has it; send use_beam_search: true as well"
            )
        if self.stream_options is not None and not self.stream:
            why = "the answer is no stream; send stream: true, or leave it out"
            raise Invalid.at("stream_options", why)
        if self.stream and self.prompt_logprobs is not None:
            raise errors.unsupported_parameter(
                "prompt_logprobs", "streams do not carry them; leave out stream or prompt_logprobs"
            )

    def _refuse_choices_of_tokens(self, others: str) -> None:
        """Refuse the fields that `others` cannot go together with."""
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise Invalid.at(name, f"{others} may need other tokens; send one only")

    def _check_beams(self) -> None:
        """Check that nothing is asked for that beam search does not heed. Raises Invalid."""
        constraints = () if self.constraint else ("response_format", "structured_outputs")
        for name, field in type(self).model_fields.items():
            default = field.get_default(call_default_factory=True)
            neutral = (default, *_BEAM_VALUES.get(name, ()))
            if name in _BEAM_FIELDS or name in constraints or getattr(self, name) in neutral:
                continue
            raise errors.unsupported_parameter(
                name, "it does not go with use_beam_search; leave out one of the two"
            )

    def for_model(self) -> GenerationRequest:
        """The request, independent of the format that it came in."""
        return GenerationRequest(
            model=self.model,
            prompts=self.asked_prompts,
            sampling=self._sampling,
            max_tokens=self.asked_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            keeps_first_tokens=self.truncation_side == "right",
            priority=Priority.BATCH if self.service_tier == "flex" else Priority.INTERACTIVE,
            request_key=self.prompt_cache_key or self.safety_identifier or self.user,
            named_token_ids=self._named_token_ids,
            constraint=self.constraint,
            bad_words=self.bad_words,
            thinking_token_budget=getattr(self, "thinking_token_budget", None),
            shows_special_tokens=not self.skip_special_tokens,
            prediction="" if self.speculation == "off" else self.predicted_text,
            drafts=self.speculation != "off" and not self.use_beam_search,
            shares_drafts=self.speculation == "shared",
        )

    @property
    def _named_token_ids(self) -> dict[str, int]:
        named = {shown_key("logit_bias", token): int(token) for token in self.logit_bias}
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
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
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            allowed_token_ids=tuple(self.allowed_token_ids),
            prompt_logprobs=self.num_prompt_logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids),
            beam_search=self.use_beam_search,
            length_penalty=self.length_penalty,
        )

    @property
    def _stops(self) -> tuple[bytes, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop.encode() for stop in stops)


class ChatRequest(Chat, _Request):
    """The body of `/v1/chat/completions`.

    max_completion_tokens: OpenAI's newer name of max_tokens; the larger counts where both are sent.
    logprobs: whether each token of the answer has its logprob.
    top_logprobs: how many of the likeliest tokens to name at each place; needs logprobs.
    tool_choice: which tools an answer may or must call.
    parallel_tool_calls: whether an answer may call several tools at once.
    include_reasoning: whether an answer shows the model's reasoning.
    echo: whether each answer begins with the text of the last message, the assistant's.
    thinking_token_budget: tokens of reasoning after which the model has to answer; 0 for none.
    prediction: text that the answer may turn out to be, which makes it faster.
    """

    exact = Chat.exact | _Request.exact
    not_served = _NOT_SERVED | {"add_special_tokens": (False,), "prompt": ()}
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MAX_LOGPROBS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    echo: bool = False
    thinking_token_budget: int | None = Field(None, ge=0, lt=2**31)
    prediction: Prediction | None = None

    @property
    def predicted_text(self) -> str:
        return self.prediction.text if self.prediction else ""

    @property
    def asked_prompts(self) -> generation_request.Chat:
        return self.for_template(self.tool_use)

    @property
    def echoed_text(self) -> str:
        """The text that each answer begins with."""
        last = self.messages[-1].plain()
        is_echoed = self.echo and last["role"] == "assistant"
        return str(last.get("content", "")) if is_echoed else ""

    @functools.cached_property
    def tool_use(self) -> ToolUse | None:
        """The tools, and which an answer may call; None without tools. Raises Invalid."""
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
        if self.tool_use:
            self._refuse_choices_of_tokens("calls of tools")
        if self.thinking_token_budget is not None and self.allowed_token_ids:
            self._refuse_choices_of_tokens("the end of reasoning")
        if self.echo and not self.echoed_text:
            why = "the last message must be the assistant's, with content"
            raise Invalid.at("echo", why)
        if self.top_logprobs and not self.logprobs:
            raise Invalid.at("top_logprobs", "it needs logprobs: true")


def _form(prompt: Any) -> str:
    """The form of a prompt, judged by its first entry; errors then speak of that form only."""
    if not isinstance(prompt, list):
        return "a text"
    first = prompt[0] if prompt else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


_Prompt = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[Text], Field(max_length=_MAX_ANSWERS), Tag("texts")]
    | Annotated[list[TokenIds], Field(max_length=_MAX_ANSWERS), Tag("lists")],
    Discriminator(_form),
]


class CompletionRequest(_Request):
    """The body of `/v1/completions`.

    max_tokens: the most tokens of an answer, 16 by default; 0 computes the prompt alone.
    prompt: a text, its token ids, or a list of texts or of lists of token ids.
    logprobs: how many of the likeliest tokens to name at each place; null for no logprobs.
    echo: whether each answer begins with its prompt.
    """

    not_served = _NOT_SERVED | {
        "add_generation_prompt": (True,),
        "add_special_tokens": (True,),
        "continue_final_message": (False,),
        "include_reasoning": (True,),
        "max_completion_tokens": (),
        "messages": (),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
    }
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
            asked = f"{self.n} answers to each of {num_prompts} prompts"
            why = f"{asked} are more than {_MAX_ANSWERS}; send fewer prompts in a request"
            raise Invalid.at("n", why)
        if self.stream and self.echo and self.logprobs is not None and self.n > 1:
            raise errors.unsupported_parameter(
                "echo",
                "streams of several answers have no prompt logprobs; leave out echo, logprobs or n",
            )


_Kind = TypeVar("_Kind", ChatRequest, CompletionRequest)


def parse_request(
    body: bytes, kind: type[_Kind], ignored: MutableSequence[str] | None = None
) -> _Kind:
    """A checked request of `kind`. Raises Invalid that names the parameter at fault.

    ignored: gets the paths of fields that are not known, which are left out; None refuses them.
    """
    asked = parse_body(body, kind, ignored)
    asked.check()
    return asked
