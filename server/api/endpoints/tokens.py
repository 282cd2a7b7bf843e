"""Text to tokens and back, as the served model has it. Paths and fields are vLLM's.

A call counts as a request, and takes no tokens.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import ConfigDict, Field
from sqlalchemy import Connection

from server.adapters.names import NamedAdapter, resolve_adapter
from server.api.answer import Answer
from server.api.bodies import BodyDep
from server.api.deps import (
    BasesDep,
    CatalogDep,
    DatabaseDep,
    EncodersDep,
    InferenceKey,
    LimiterDep,
    authenticate,
)
from server.api.request_objects import parse_body, parse_object, read_object
from server.api.tokenize_requests import ChatToTokenize, TextToTokenize, TokensToDecode
from server.api.unknown_fields import IgnoredFields
from server.inference import prompts
from server.inference.admission import count_request
from server.inference.errors import engine_unavailable, unknown_token_ids
from server.inference.served_base import ServedBase
from server.inference.texts import Text

router = APIRouter(dependencies=[Depends(authenticate)])


class Tokens(Answer):
    """The tokens of a text or of a chat.

    token_strs: as the tokenizer's file writes them, null for ids that it does not have; only where
    asked for.   max_model_len: null while no engine has said it.
    """

    count: int = Field(examples=[2])
    max_model_len: int | None = Field(examples=[32_768])
    tokens: list[int] = Field(examples=[[9707, 1049]])
    token_strs: list[str | None] | None = Field(examples=[["Hello", "Ġthere"]])


class TokenText(Answer):
    """The text of tokens, with special tokens written out."""

    prompt: str = Field(examples=["Hello there"])


class TokenizerInfo(Answer):
    """The tokenizer's special tokens and the chat template; other special tokens are fields too."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str]
    tokenizer_class: str = Field(examples=["PreTrainedTokenizerFast"])
    vocab_size: int = Field(examples=[151_936])
    model_max_length: int | None = Field(examples=[32_768])
    bos_token: str | None = Field(examples=["<|begin|>"])
    eos_token: str | None = Field(examples=["<|end|>"])
    pad_token: str | None = Field(examples=["<|pad|>"])
    unk_token: str | None = Field(examples=["<|unknown|>"])
    chat_template: str | None = Field(examples=["{{ messages[0].content }}"])


_Find = Callable[[str | None], Awaitable[tuple[ServedBase, Text]]]


def _finder(
    database: DatabaseDep,
    catalog: CatalogDep,
    bases: BasesDep,
    encoders: EncodersDep,
    identity: InferenceKey,
) -> _Find:
    """Finds the base model of a model, the default one for None, and the model's text."""

    async def find(model: str | None) -> tuple[ServedBase, Text]:
        base = bases.default if model is None else bases.named(model)
        if base is not None:
            return base, base.text

        def read(conn: Connection) -> NamedAdapter:
            return resolve_adapter(conn, catalog, identity, str(model), request_key=str(model))

        named = await database.read(read)
        if (base := bases.serving(named.base)) is None:
            raise engine_unavailable()
        return base, await base.text_of(named, encoders, identity.tenant_id)

    return find


_FindDep = Annotated[_Find, Depends(_finder)]


@router.post("/tokenize")
async def tokenize(
    find: _FindDep,
    limiter: LimiterDep,
    encoders: EncodersDep,
    identity: InferenceKey,
    body: BodyDep,
    ignored: IgnoredFields,
) -> Tokens:
    """Get the token ids of a prompt, or of a chat as the model's template renders it."""
    values = read_object(body)
    asked: TextToTokenize | ChatToTokenize
    if values.get("messages") is None:
        asked = parse_object(values, TextToTokenize, ignored)
    else:
        asked = parse_object(values, ChatToTokenize, ignored)
    await count_request(limiter, identity)
    base, text = await find(asked.model)
    # Always on a thread, as for a long prompt: no answer waits for these tokens.
    token_ids = await encoders.run(
        identity.tenant_id, len(body) + text.render_bytes, lambda: _encode(text, asked)
    )
    text_of = text.tokenizer.token_text
    return Tokens(
        count=len(token_ids),
        max_model_len=base.max_model_len or None,
        tokens=token_ids,
        token_strs=[text_of(i) for i in token_ids] if asked.return_token_strs else None,
    )


@router.post("/detokenize")
async def detokenize(
    find: _FindDep,
    limiter: LimiterDep,
    encoders: EncodersDep,
    identity: InferenceKey,
    body: BodyDep,
    ignored: IgnoredFields,
) -> TokenText:
    """Get the text of token ids, with special tokens written out."""
    asked = parse_body(body, TokensToDecode, ignored)
    await count_request(limiter, identity)
    _, text = await find(asked.model)
    for place, token_id in enumerate(asked.tokens):
        if token_id >= text.vocabulary_size:
            raise unknown_token_ids([token_id], text.vocabulary_size, param=f"tokens[{place}]")
    decode = functools.partial(text.tokenizer.decode, asked.tokens)
    return TokenText(prompt=await encoders.run(identity.tenant_id, len(body), decode))


@router.get("/tokenizer_info")
async def tokenizer_info(
    find: _FindDep, model: Annotated[str | None, Query(max_length=512)] = None
) -> TokenizerInfo:
    """Get the tokenizer's special tokens and the chat template, of the first model by default."""
    base, text = await find(model)
    texts: dict[str, Any] = dict.fromkeys(
        ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
    )
    return TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        vocab_size=text.vocabulary_size,
        model_max_length=base.max_model_len or None,
        **texts | text.tokenizer.chat_template.description,
    )


def _encode(text: Text, asked: TextToTokenize | ChatToTokenize) -> list[int]:
    if isinstance(asked, ChatToTokenize):
        asked.check_chat()
        chat = asked.for_template(asked.use_of_tools(is_parallel=True))
        return prompts.encode_chat(text, chat)
    return text.tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
