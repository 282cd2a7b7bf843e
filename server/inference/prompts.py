"""Prompts as token ids: rendered, encoded, checked; and the room they leave for the answer."""

import asyncio

from server.faults import Invalid
from server.inference.errors import context_length_exceeded, unknown_token_id
from server.inference.generation_request import Chat, GenerationRequest
from server.inference.served_base import ServedBase
from server.text.tokenizer import TemplateError, Tokenizer

_INLINE_CHARACTERS = 4096
"""Longer prompts are tokenized on a thread: 4 kB take 0.3 ms, which delays no stream."""
_MESSAGE_CHARACTERS = 64
"""Characters that a template adds to a message, so that thousands of empty ones count too."""


def is_long(request: GenerationRequest) -> bool:
    """Whether the request's prompts take noticeable time to tokenize."""
    if isinstance(request.prompts, Chat):
        messages = request.prompts.messages
        size = sum(len(message["content"]) + _MESSAGE_CHARACTERS for message in messages)
    else:
        size = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, str))
    return size > _INLINE_CHARACTERS


async def tokenize(base: ServedBase, request: GenerationRequest) -> list[list[int]]:
    """Exact tokens of every prompt; long prompts are encoded on a thread. Raises Invalid."""
    if is_long(request):
        prompts = await asyncio.to_thread(_encode, base.tokenizer, request)
    else:
        prompts = _encode(base.tokenizer, request)
    for ids in prompts:
        _check_ids(ids, base.vocabulary_size, request.prompt_param)
    for param, token_id in request.named_token_ids.items():
        if token_id >= base.vocabulary_size:
            raise unknown_token_id(base.vocabulary_size, param=param)
    return [_truncated(request, ids, base.max_model_len) for ids in prompts]


def max_tokens(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """Completion tokens of each answer: those asked for, or all that the context leaves. Raises
    Invalid.

    num_prompt_tokens: of the longest prompt.
    """
    wanted = request.max_tokens
    needed = num_prompt_tokens + (wanted or 1)
    if needed > max_model_len:
        param = request.prompt_param
        raise context_length_exceeded(limit=max_model_len, asked=needed, param=param)
    most = max_model_len - num_prompt_tokens if wanted is None else wanted
    if request.sampling.min_tokens > most:
        raise Invalid(
            f"min_tokens: it may be at most {most}, the most tokens that may be generated.",
            param="min_tokens",
        )
    return most


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """The tokens of a chat as the model's template renders it. Raises Invalid."""
    return tokenizer.encode(_rendered(tokenizer, chat), add_special_tokens=False)


def _encode(tokenizer: Tokenizer, request: GenerationRequest) -> list[list[int]]:
    if isinstance(request.prompts, Chat):
        return [encode_chat(tokenizer, request.prompts)]
    return [tokenizer.encode(p) if isinstance(p, str) else p for p in request.prompts]


def _rendered(tokenizer: Tokenizer, chat: Chat) -> str:
    messages = [dict(message) for message in chat.messages]
    try:
        if chat.continues:
            return tokenizer.render_open(messages)
        return tokenizer.render(messages, add_generation_prompt=chat.begins)
    except TemplateError as error:
        raise Invalid(str(error), param="messages") from None


def _truncated(request: GenerationRequest, ids: list[int], max_model_len: int) -> list[int]:
    """The last tokens of a prompt, as many as the request wants to keep."""
    most = request.truncate_prompt_tokens
    if most is None:
        return ids
    if most == -1:
        most = max(1, max_model_len - (request.max_tokens or 1))
    return ids[-most:]


def _check_ids(ids: list[int], vocabulary_size: int, param: str) -> None:
    if not ids:
        raise Invalid("The prompt is empty.", param=param)
    if max(ids) >= vocabulary_size:
        raise unknown_token_id(vocabulary_size, param=param)
