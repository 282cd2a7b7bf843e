"""From what was asked to token ids: rendered, encoded, checked; and what the context leaves."""

import asyncio

from server import errors
from server.gateway import Gateway
from server.openai import ChatRequest, CompletionRequest
from server.tokenizer import TemplateError

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
    prompt = asked.prompt
    if isinstance(prompt, list):
        return sum(len(part) for part in prompt if isinstance(part, str)) > _INLINE_CHARACTERS
    return len(prompt) > _INLINE_CHARACTERS


async def tokenize(gateway: Gateway, asked: Asked) -> list[int]:
    """Exact prompt tokens, off the event loop when they are many. Raises ApiError."""
    if isinstance(asked, CompletionRequest) and (ids := _given_ids(asked)) is not None:
        return _checked_ids(gateway, ids)
    if is_long(asked):
        ids = await asyncio.to_thread(_encode, gateway, asked)
    else:
        ids = _encode(gateway, asked)
    return _checked_ids(gateway, ids)


def max_tokens(gateway: Gateway, asked: Asked, num_prompt_tokens: int) -> int:
    """What was asked for, or all that the context leaves. Raises context_length_exceeded."""
    limit = gateway.max_model_len
    wanted = asked.asked_tokens
    if num_prompt_tokens + (wanted or 1) > limit:
        raise errors.context_length_exceeded(
            limit=limit, asked=num_prompt_tokens + (wanted or 1), param=param_of(asked)
        )
    return wanted or limit - num_prompt_tokens


def param_of(asked: Asked) -> str:
    """The parameter that a prompt comes in."""
    return "messages" if isinstance(asked, ChatRequest) else "prompt"


def _given_ids(asked: CompletionRequest) -> list[int] | None:
    """A prompt that is token ids already. Raises ApiError for several prompts."""
    if not isinstance(asked.prompt, list):
        return None
    ids = [token for token in asked.prompt if isinstance(token, int)]
    if len(ids) == len(asked.prompt):
        return ids
    if len(asked.prompt) != 1:
        raise errors.invalid_request("Send one prompt per request.", param="prompt")
    return None


def _encode(gateway: Gateway, asked: Asked) -> list[int]:
    if isinstance(asked, CompletionRequest):
        prompt = asked.prompt
        return gateway.tokenizer.encode(str(prompt[0]) if isinstance(prompt, list) else prompt)
    try:
        text = gateway.tokenizer.render([message.plain() for message in asked.messages])
    except TemplateError as error:
        raise errors.invalid_request(str(error), param="messages") from None
    return gateway.tokenizer.encode(text, add_special_tokens=False)


def _checked_ids(gateway: Gateway, ids: list[int]) -> list[int]:
    if not ids:
        raise errors.invalid_request("The prompt is empty.", param="prompt")
    if max(ids) >= gateway.vocabulary_size:
        raise errors.unknown_token_id(gateway.vocabulary_size, param="prompt")
    return ids
