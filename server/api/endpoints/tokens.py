"""Text to tokens and back, as the served model has it. Paths and fields are vLLM's.

A call counts as a request, and takes no tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query
from pydantic import ConfigDict, Field

from server.adapters.names import resolve_adapter
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

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class _Models:
    """The models that the caller may name, by whose texts it counts tokens."""

    database: DatabaseDep
    catalog: CatalogDep
    bases: BasesDep
    encoders: EncodersDep
    limiter: LimiterDep
    identity: InferenceKey

    async def count(self) -> None:
        """Count the call against the limits of requests. Raises RateLimited."""
        await count_request(self.limiter, self.identity)

    async def find(self, model: str | None) -> tuple[ServedBase, Text]:
        """The base model of a model, the default one for None, and the model's text."""
        base = self.bases.default if model is None else self.bases.named(model)
        if base is not None:
            return base, base.text
        asked, identity, catalog = str(model), self.identity, self.catalog
        named = await self.database.read(
            lambda conn: resolve_adapter(conn, catalog, identity, asked, request_key=asked)
        )
        if (base := self.bases.serving(named.base)) is None:
            raise engine_unavailable()
        return base, await base.text_of(named, self.encoders, identity.tenant_id)

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """The result of work on a thread; `size_bytes` is the size of what it reads."""
        return await self.encoders.run(self.identity.tenant_id, size_bytes, work)


_ModelsDep = Annotated[_Models, Depends()]


@router.post("/tokenize")
async def tokenize(models: _ModelsDep, body: BodyDep, ignored: IgnoredFields) -> Tokens:
    """Get the token ids of a prompt, or of a chat as the model's template renders it."""
    values = read_object(body)
    asked: TextToTokenize | ChatToTokenize
    if values.get("messages") is None:
        asked = parse_object(values, TextToTokenize, ignored)
    else:
        asked = parse_object(values, ChatToTokenize, ignored)
    await models.count()
    base, text = await models.find(asked.model)
    # Always on a thread, as for a long prompt: no answer waits for these tokens.
    token_ids = await models.run(len(body) + text.render_bytes, lambda: _encode(text, asked))
    text_of = text.tokenizer.token_text
    return Tokens(
        count=len(token_ids),
        max_model_len=base.max_model_len or None,
        tokens=token_ids,
        token_strs=[text_of(i) for i in token_ids] if asked.return_token_strs else None,
    )


@router.post("/detokenize")
async def detokenize(models: _ModelsDep, body: BodyDep, ignored: IgnoredFields) -> TokenText:
    """Get the text of token ids, with special tokens written out."""
    asked = parse_body(body, TokensToDecode, ignored)
    await models.count()
    _, text = await models.find(asked.model)
    for place, token_id in enumerate(asked.tokens):
        if token_id >= text.vocabulary_size:
            raise unknown_token_ids([token_id], text.vocabulary_size, param=f"tokens[{place}]")
    decode = functools.partial(text.tokenizer.decode, asked.tokens)
    return TokenText(prompt=await models.run(len(body), decode))


@router.get("/tokenizer_info")
async def tokenizer_info(
    models: _ModelsDep, model: Annotated[str | None, Query(max_length=512)] = None
) -> TokenizerInfo:
    """Get the tokenizer's special tokens and the chat template, of the first model by default."""
    base, text = await models.find(model)
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
