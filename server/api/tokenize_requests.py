"""Bodies of `/tokenize` and `/detokenize`, in vLLM's formats."""

from typing import Literal

from server.api.chat_messages import Chat, Key, Text
from server.api.field_types import TokenIds
from server.api.request_objects import RequestObject


class TextToTokenize(RequestObject):
    """The body of `/tokenize` with a text. Its fields are vLLM's.

    model: the model's name, as requests give it; null for the first base model.
    prompt: the text to tokenize.
    add_special_tokens: whether the model's first token, and the like, are added.
    return_token_strs: whether the answer has the texts of the tokens as well.
    """

    model: Key = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ChatToTokenize(Chat):
    """The body of `/tokenize` with messages.

    model: the model's name, as requests give it; null for the first base model.
    add_special_tokens: only false, since the chat template adds the special tokens itself.
    return_token_strs: whether the answer has the texts of the tokens as well.
    """

    model: Key = None
    add_special_tokens: Literal[False] = False
    return_token_strs: bool = False


class TokensToDecode(RequestObject):
    """The body of `/detokenize`.

    model: the model's name, as requests give it; null for the first base model.
    tokens: the ids of the tokens.
    """

    model: Key = None
    tokens: TokenIds
