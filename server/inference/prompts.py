"""Prompts as token ids: rendered, encoded, checked; and the room they leave for the answer."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from registry.errors import Invalid
from server.inference.encoders import Encoders
from server.inference.errors import context_length_exceeded, empty_prompt, unknown_token_ids
from server.inference.generation_request import Chat, GenerationRequest
from server.inference.served_base import ServedBase
from server.inference.texts import Text
from server.text import template_variables
from server.text.tokenizer import TemplateError

_INLINE_CHARACTERS = 4096
"""Longer prompts are tokenized on a thread: 4 kB take 0.3 ms, which delays no stream."""
_MESSAGE_CHARACTERS = 64
"""Characters that a template adds to a message, so that thousands of empty ones count too."""


def is_long(text: Text, request: GenerationRequest) -> bool:
    """Whether the request's texts take noticeable time to render and to tokenize."""
    if isinstance(request.prompts, Chat) and text.tokenizer.is_confined:
        return True
    texts = (*_texts(request), request.prediction, *request.bad_words)
    return sum(map(len, texts)) + _template_size(request) > _INLINE_CHARACTERS


def least_tokens(text: Text, request: GenerationRequest) -> int:
    """A number of tokens, 1 or more, that the prompts have at least. A template may shorten a
    chat, so nothing is known of its tokens.
    """
    if isinstance(request.prompts, Chat):
        return 1
    return max(1, sum(map(text.tokenizer.least_tokens, _texts(request))))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of every prompt.   is_reasoning: a chat's prompt ends within a reasoning part.

    predicted_token_ids: tokens of the prediction, no more than an answer may have.
    bad_words: tokens of words that an answer must not have.
    """

    token_ids: list[list[int]]
    is_reasoning: bool = False
    predicted_token_ids: list[int] = field(default_factory=list)
    bad_words: tuple[tuple[int, ...], ...] = ()


async def tokenize(
    base: ServedBase,
    text: Text,
    encoders: Encoders,
    tenant_id: str,
    request: GenerationRequest,
) -> Prompts:
    """Exact tokens of every prompt and of the prediction; long texts are encoded on a thread.

    Raises Invalid, and Overloaded if no thread is free in time.
    """
    if is_long(text, request):
        texts = (*_texts(request), request.prediction, *request.bad_words)
        size_bytes = sum(len(each.encode()) for each in texts) + _template_size(request)
        size_bytes += text.render_bytes
        prompts = await encoders.run(tenant_id, size_bytes, lambda: _encode(base, text, request))
    else:
        prompts = _encode(base, text, request)
    is_list = len(prompts.token_ids) > 1
    for number, ids in enumerate(prompts.token_ids):
        param = f"{request.prompt_param}[{number}]" if is_list else request.prompt_param
        _check_ids(ids, text.vocabulary_size, param)
    size = text.vocabulary_size
    unknown = {param: i for param, i in request.named_token_ids.items() if i >= size}
    if unknown:
        raise unknown_token_ids([*unknown.values()], size, param=next(iter(unknown)))
    kept = [_truncated(request, ids, base.longest) for ids in prompts.token_ids]
    return replace(prompts, token_ids=kept)


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


def encode_chat(text: Text, chat: Chat) -> list[int]:
    """The tokens of a chat as the model's template renders it. Raises Invalid."""
    return text.tokenizer.encode(_rendered(text, chat), add_special_tokens=False)


def _encode(base: ServedBase, text: Text, request: GenerationRequest) -> Prompts:
    if isinstance(request.prompts, Chat):
        chat = _rendered(text, request.prompts)
        _check_length(base, text, request, chat)
        is_reasoning = text.dialect.template.is_reasoning(chat)
        ids = [text.tokenizer.encode(chat, add_special_tokens=False)]
        return Prompts(ids, is_reasoning, _predicted(base, text, request), _bad(text, request))
    for prompt in _texts(request):
        _check_length(base, text, request, prompt)
    ids = [text.tokenizer.encode(p) if isinstance(p, str) else p for p in request.prompts]
    return Prompts(ids, False, _predicted(base, text, request), _bad(text, request))


def _predicted(base: ServedBase, text: Text, request: GenerationRequest) -> list[int]:
    """The prediction's tokens, as many as an answer may have; what lies beyond is dropped."""
    prediction = request.prediction
    if not prediction:
        return []
    most = min(request.max_tokens or base.longest, base.longest)
    if text.tokenizer.most_bytes_per_token is not None:
        # A character has a byte or more, so this much text has as many tokens.
        prediction = prediction[: most * text.tokenizer.most_bytes_per_token]
    ids = text.tokenizer.encode(prediction, add_special_tokens=False)
    # The model has no embedding of ids beyond its vocabulary.
    known = itertools.takewhile(lambda token_id: token_id < text.vocabulary_size, ids)
    return list(itertools.islice(known, most))


def _bad(text: Text, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
    """Each bad word as it begins a text, and with a space before it, as vLLM reads them."""
    spelled = [space + word.lstrip() for word in request.bad_words for space in ("", " ")]
    ids = [tuple(text.tokenizer.encode(it, add_special_tokens=False)) for it in spelled]
    return tuple(dict.fromkeys(ids))


def _check_length(base: ServedBase, text: Text, request: GenerationRequest, prompt: str) -> None:
    """Refuse a text whose bytes alone say that it is too long for the model. Raises Invalid."""
    if request.truncate_prompt_tokens is not None:
        return
    least = text.tokenizer.least_tokens(prompt)
    if least > base.longest:
        param = request.prompt_param
        raise context_length_exceeded(limit=base.longest, at_least=least, param=param)


def _texts(request: GenerationRequest) -> list[str]:
    """Each text that the caller sent as a prompt, or as part of one."""
    if isinstance(request.prompts, Chat):
        return [text for message in request.prompts.messages for text in _texts_in(message)]
    return [prompt for prompt in request.prompts if isinstance(prompt, str)]


def _template_size(request: GenerationRequest) -> int:
    """Characters that a template adds to the texts, about."""
    if isinstance(request.prompts, Chat):
        tools = request.prompts.use.size_bytes if request.prompts.use else 0
        tools += template_variables.size_bytes(request.prompts.variables)
        return tools + _MESSAGE_CHARACTERS * len(request.prompts.messages)
    return 0


def _texts_in(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message: what was said, thought, and given to tools."""
    said = [message.get("content"), message.get("reasoning_content")]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return [text for text in (*said, *calls) if text]


def _rendered(text: Text, chat: Chat) -> str:
    tools = [tool.declared for tool in chat.use.tools] if chat.use else []
    try:
        return text.dialect.prompt(
            text.tokenizer,
            chat.messages,
            tools,
            chat.variables,
            begins=chat.begins,
            continues=chat.continues,
        )
    except TemplateError as error:
        raise Invalid(str(error), param="messages") from None


def _truncated(request: GenerationRequest, ids: list[int], max_model_len: int) -> list[int]:
    """The last tokens of a prompt, or the first, as many as the request wants to keep."""
    most = request.truncate_prompt_tokens
    if most is None:
        return ids
    if most == -1:
        most = max(1, max_model_len - (request.max_tokens or 1))
    return ids[:most] if request.keeps_first_tokens else ids[-most:]


def _check_ids(ids: list[int], vocabulary_size: int, param: str) -> None:
    if not ids:
        raise empty_prompt(param=param)
    if unknown := [token_id for token_id in ids if token_id >= vocabulary_size]:
        raise unknown_token_ids(unknown, vocabulary_size, param=param)
