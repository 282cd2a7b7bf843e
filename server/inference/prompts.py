"""Prompts as token ids: rendered, encoded, checked; and the room they leave for the answer."""

from server.faults import Invalid
from server.inference.encoders import Encoders
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
    return sum(map(len, _texts(request))) + _template_size(request) > _INLINE_CHARACTERS


def least_tokens(base: ServedBase, request: GenerationRequest) -> int:
    """A number of tokens, 1 or more, that the prompts have at least. A template may shorten a
    chat, so nothing is known of its tokens.
    """
    if isinstance(request.prompts, Chat):
        return 1
    return max(1, sum(map(base.tokenizer.least_tokens, _texts(request))))


async def tokenize(
    base: ServedBase, encoders: Encoders, tenant_id: str, request: GenerationRequest
) -> list[list[int]]:
    """Exact tokens of every prompt; long prompts are encoded on a thread.

    Raises Invalid, and Overloaded if no thread is free in time.
    """
    if is_long(request):
        size_bytes = sum(len(text.encode()) for text in _texts(request)) + _template_size(request)
        prompts = await encoders.run(tenant_id, size_bytes, lambda: _encode(base, request))
    else:
        prompts = _encode(base, request)
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
        raise context_length_exceeded(limit=max_model_len, at_least=needed, param=param)
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


def _encode(base: ServedBase, request: GenerationRequest) -> list[list[int]]:
    if isinstance(request.prompts, Chat):
        text = _rendered(base.tokenizer, request.prompts)
        _check_length(base, request, text)
        return [base.tokenizer.encode(text, add_special_tokens=False)]
    for prompt in _texts(request):
        _check_length(base, request, prompt)
    return [base.tokenizer.encode(p) if isinstance(p, str) else p for p in request.prompts]


def _check_length(base: ServedBase, request: GenerationRequest, text: str) -> None:
    """Refuse a text whose bytes alone say that it is too long for the model. Raises Invalid."""
    if request.truncate_prompt_tokens is not None:
        return
    least = base.tokenizer.least_tokens(text)
    if least > base.max_model_len:
        param = request.prompt_param
        raise context_length_exceeded(limit=base.max_model_len, at_least=least, param=param)


def _texts(request: GenerationRequest) -> list[str]:
    """Each text that the caller sent as a prompt, or as part of one."""
    if isinstance(request.prompts, Chat):
        return [message["content"] for message in request.prompts.messages]
    return [prompt for prompt in request.prompts if isinstance(prompt, str)]


def _template_size(request: GenerationRequest) -> int:
    """Characters that a template adds to the texts, about."""
    if isinstance(request.prompts, Chat):
        return _MESSAGE_CHARACTERS * len(request.prompts.messages)
    return 0


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
