"""From what was asked to token ids: rendered, encoded, checked; and what the context leaves."""

import asyncio

from server.api import errors
from server.api.openai import Chat, ChatRequest, CompletionRequest
from server.gateway import Gateway
from server.text.tokenizer import TemplateError, Tokenizer

Asked = ChatRequest | CompletionRequest

_INLINE_CHARACTERS = 4096
"""Longer prompts are tokenized on a thread: 4 kB take 0.3 ms, which no stream notices."""
_MESSAGE_CHARACTERS = 64
"""What a template adds to a message, so that thousands of empty ones count as well."""


def is_long(asked: Asked) -> bool:
    """Whether it costs something to tokenize it."""
    if isinstance(asked, ChatRequest):
        size = sum(len(message.plain()["content"]) for message in asked.messages)
        return size + _MESSAGE_CHARACTERS * len(asked.messages) > _INLINE_CHARACTERS
    return sum(len(p) for p in asked.prompts if isinstance(p, str)) > _INLINE_CHARACTERS


async def tokenize(gateway: Gateway, asked: Asked) -> list[list[int]]:
    """Exact tokens of every prompt, off the event loop when they are many. Raises ApiError."""
    if is_long(asked):
        prompts = await asyncio.to_thread(_encode, gateway, asked)
    else:
        prompts = _encode(gateway, asked)
    for ids in prompts:
        _check_ids(gateway, ids, param_of(asked))
    return [_truncated(gateway, asked, ids) for ids in prompts]


def max_tokens(gateway: Gateway, asked: Asked, num_prompt_tokens: int) -> int:
    """What was asked for, or all that the context leaves. Raises context_length_exceeded.

    num_prompt_tokens: of the longest prompt.
    """
    limit = gateway.max_model_len
    wanted = asked.asked_tokens
    if num_prompt_tokens + (wanted or 1) > limit:
        raise errors.context_length_exceeded(
            limit=limit, asked=num_prompt_tokens + (wanted or 1), param=param_of(asked)
        )
    most = limit - num_prompt_tokens if wanted is None else wanted
    asked.check_max_tokens(most)
    return most


def param_of(asked: Asked) -> str:
    """The parameter that a prompt comes in."""
    return "messages" if isinstance(asked, ChatRequest) else "prompt"


def _encode(gateway: Gateway, asked: Asked) -> list[list[int]]:
    tokenizer = gateway.tokenizer
    if isinstance(asked, CompletionRequest):
        return [tokenizer.encode(p) if isinstance(p, str) else p for p in asked.prompts]
    return [encode_chat(tokenizer, asked)]


def encode_chat(tokenizer: Tokenizer, asked: Chat) -> list[int]:
    """The tokens of a chat as the model's template renders it. Raises ApiError."""
    return tokenizer.encode(_rendered(tokenizer, asked), add_special_tokens=False)


def _rendered(tokenizer: Tokenizer, asked: Chat) -> str:
    messages = [message.plain() for message in asked.messages]
    try:
        if asked.continue_final_message:
            return tokenizer.render_open(messages)
        begins = asked.add_generation_prompt is not False
        return tokenizer.render(messages, add_generation_prompt=begins)
    except TemplateError as error:
        raise errors.invalid_request(str(error), param="messages") from None


def _truncated(gateway: Gateway, asked: Asked, ids: list[int]) -> list[int]:
    """The last tokens of a prompt, as many as were asked for; -1: as the context leaves."""
    most = asked.truncate_prompt_tokens
    if most is None:
        return ids
    if most == -1:
        most = max(1, gateway.max_model_len - (asked.asked_tokens or 1))
    return ids[-most:]


def _check_ids(gateway: Gateway, ids: list[int], param: str) -> None:
    if not ids:
        raise errors.invalid_request("The prompt is empty.", param=param)
    if max(ids) >= gateway.vocabulary_size:
        raise errors.unknown_token_id(gateway.vocabulary_size, param=param)
