"""Completions as the OpenAPI document describes them.

`answers` and `logprobs` make them as dicts: no model is built or checked while a request is served.
"""

from typing import Any, Literal

from pydantic import Field

from engine.wire.messages import StopCause
from server.api.answer import Answer

_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


FinishReason = Literal["stop", "length", "tool_calls"]


def _left_out(**options: Any) -> Any:
    """Declare a field that is left out where it has no value, unlike other answers' fields."""
    return Field(default_factory=lambda: None, **options)


# ---- usage ----


class CachedTokens(Answer):
    """The part of a prompt that was in the prefix cache."""

    cached_tokens: int = Field(examples=[0])


class CompletionTokensDetails(Answer):
    """How the tokens of a completion came about.

    accepted_prediction_tokens: completion tokens that were drafted.   rejected_prediction_tokens:
    drafted tokens that are not in the answer, which are not counted elsewhere and cost nothing.
    reasoning_tokens: tokens of reasoning parts, with the marks around them; only for models that
    write such parts.
    """

    accepted_prediction_tokens: int = Field(examples=[0])
    rejected_prediction_tokens: int = Field(examples=[0])
    reasoning_tokens: int = _left_out(examples=[0])


class TokenCounts(Answer):
    """Tokens of a request, all its answers together."""

    prompt_tokens: int = Field(examples=[12])
    completion_tokens: int = Field(examples=[2])
    total_tokens: int = Field(examples=[14])
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokensDetails


class Charge(Answer):
    """Chorale's part of the usage.

    cost_nanousd: the request's cost in nano-dollars.   adapter_digest: the SHA-256 of the adapter
    that was applied, null for the base model.   stop_cause: how the last answer ended.
    """

    cost_nanousd: int = Field(examples=[2600])
    price_version: int = Field(examples=[1])
    adapter_digest: str | None = Field(examples=[_DIGEST])
    stop_cause: StopCause


class CompletionUsage(TokenCounts):
    """Tokens and cost of a whole request."""

    x_chorale: Charge


# ---- logprobs ----


class LikelyToken(Answer):
    """A token and the natural logarithm of its probability.   bytes: null for a special token."""

    token: str = Field(examples=["Hello"])
    logprob: float = Field(examples=[-0.25])
    bytes: list[int] | None = Field(examples=[[72, 101, 108, 108, 111]])


class ChatTokenLogprob(LikelyToken):
    """A token of a chat's answer, with the likeliest tokens at its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Answer):
    """Logprobs of a chat's answer, one entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None


class TextLogprobs(Answer):
    """Logprobs of a completion; each list has an entry for each token.

    The first token of an echoed prompt has none: null.   text_offset: characters before each token.
    """

    tokens: list[str] = Field(examples=[["Hello", "!"]])
    token_logprobs: list[float | None] = Field(examples=[[-0.25, -0.5]])
    top_logprobs: list[dict[str, float] | None] = Field(
        examples=[[{"Hello": -0.25}, {"!": -0.5, ",": -1.25}]]
    )
    text_offset: list[int] = Field(examples=[[0, 5]])


class PromptTokenLogprob(Answer):
    """A token at a place of the prompt.   rank: its place among all tokens, 1 for the likeliest."""

    logprob: float = Field(examples=[-2.5])
    rank: int = Field(examples=[3])
    decoded_token: str = Field(examples=[" there"])


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None] | None
"""Tokens by id, for each place of a prompt; null for the first one, and where not asked for."""


def _prompt_logprobs() -> Any:
    entry = {"logprob": -2.5, "rank": 3, "decoded_token": " there"}
    return Field(examples=[[None, {"1049": entry}]])


# ---- choices ----


class AnswerEnd(Answer):
    """Chorale's words on an answer's end.

    stop_cause: how it ended.   not_enforced: paths of what the schemas of tools demand and nothing
    enforced; left out if there are none.
    """

    stop_cause: StopCause
    not_enforced: list[str] = _left_out(
        examples=[["tools[0].function.parameters.properties.tags.uniqueItems"]]
    )


class _Choice(Answer):
    """One answer, or a part of one.   token_ids: null without `return_token_ids`."""

    index: int = Field(examples=[0])
    token_ids: list[int] | None = Field(examples=[[9707, 0]])


class _WholeChoice(_Choice):
    finish_reason: FinishReason
    x_chorale: AnswerEnd


class _ChoicePart(_Choice):
    """A part of one answer.   x_chorale: only in the answer's last event."""

    finish_reason: FinishReason | None
    x_chorale: AnswerEnd = _left_out()


class CalledFunction(Answer):
    """A tool's name, and its arguments as JSON."""

    name: str = Field(examples=["get_weather"])
    arguments: str = Field(examples=['{"city": "Oslo"}'])


class ToolCall(Answer):
    """A call of a tool."""

    id: str = Field(examples=["call_0b7e61f3c2d94a58b1f6a9d3"])
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(Answer):
    """The assistant's message.

    content: null if the answer is calls only.   reasoning, reasoning_content: both have the text of
    the reasoning parts, null without any.   tool_calls: only if there are calls.
    """

    role: Literal["assistant"]
    content: str | None = Field(examples=["Hello!"])
    refusal: None
    reasoning: str | None = Field(examples=["The user greets."])
    reasoning_content: str | None = Field(examples=["The user greets."])
    tool_calls: list[ToolCall] = _left_out()


class CalledFunctionPart(Answer):
    """A part of a call.   name: only in the call's first part."""

    name: str = _left_out(examples=["get_weather"])
    arguments: str = Field(examples=['{"city"'])


class ToolCallPart(Answer):
    """The text that an event adds to a call.   id, type: only in the call's first part."""

    index: int = Field(examples=[0])
    id: str = _left_out(examples=["call_0b7e61f3c2d94a58b1f6a9d3"])
    type: Literal["function"] = _left_out()
    function: CalledFunctionPart


class ChatDelta(Answer):
    """The text that an event adds to the message.   role: only in the answer's first event.

    reasoning, reasoning_content: the same text, of a reasoning part.
    """

    role: Literal["assistant"] = _left_out()
    content: str = _left_out(examples=["Hello"])
    reasoning: str = _left_out(examples=["The user"])
    reasoning_content: str = _left_out(examples=["The user"])
    tool_calls: list[ToolCallPart] = _left_out()


class ChatChoice(_WholeChoice):
    """One of the answers to a chat."""

    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None


class ChatChoicePart(_ChoicePart):
    """A part of one of the answers to a chat."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class TextChoice(_WholeChoice):
    """One of the answers to one of the prompts.

    prompt_token_ids: null without `return_token_ids`.   prompt_logprobs: null unless asked for.
    """

    text: str = Field(examples=["Hello!"])
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = Field(examples=[[1, 9707, 1049]])
    prompt_logprobs: PromptLogprobs = _prompt_logprobs()


class TextChoicePart(_ChoicePart):
    """A part of one of the answers to one of the prompts.

    prompt_token_ids: with `return_token_ids`, in the answer's first event; null elsewhere.
    """

    text: str = Field(examples=["Hello"])
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = Field(examples=[[1, 9707, 1049]])


# ---- answers ----


class _Head(Answer):
    created: int = Field(examples=[1_798_761_600])
    model: str = Field(examples=["my-adapter"])
    system_fingerprint: str = Field(examples=["fp_9f86d081884c"])
    service_tier: Literal["default", "flex"]


class _ChatHead(_Head):
    id: str = Field(examples=["chatcmpl-0b7e61f3c2d94a58b1f6a9d3e4c85270"])


class _TextHead(_Head):
    id: str = Field(examples=["cmpl-0b7e61f3c2d94a58b1f6a9d3e4c85270"])
    object: Literal["text_completion"]


class ChatCompletion(_ChatHead):
    """The whole answer to a chat.

    prompt_token_ids: null without `return_token_ids`.   prompt_logprobs: null unless asked for.
    """

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] | None = Field(examples=[[1, 9707, 1049]])
    prompt_logprobs: PromptLogprobs = _prompt_logprobs()


class TextCompletion(_TextHead):
    """The whole answer to a request for completions."""

    choices: list[TextChoice]
    usage: CompletionUsage


class ChatCompletionChunk(_ChatHead):
    """An event of a streamed answer to a chat.

    prompt_token_ids: only in an answer's first event, null without `return_token_ids`.
    choices: one, or none in the last event, which has the usage.   usage: with `include_usage`,
    null before the last event; with `continuous_usage_stats`, the counts so far.   obfuscation:
    characters without a meaning, in a stream whose events are padded.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChoicePart]
    prompt_token_ids: list[int] | None = _left_out(examples=[[1, 9707, 1049]])
    usage: CompletionUsage | TokenCounts | None = _left_out()
    obfuscation: str = _left_out(examples=["--------"])


class TextCompletionChunk(_TextHead):
    """An event of a streamed answer to a request for completions.

    choices: one, or none in the last event, which has the usage.   usage: with `include_usage`,
    null before the last event; with `continuous_usage_stats`, the counts so far.   obfuscation:
    characters without a meaning, in a stream whose events are padded.
    """

    choices: list[TextChoicePart]
    usage: CompletionUsage | TokenCounts | None = _left_out()
    obfuscation: str = _left_out(examples=["--------"])
