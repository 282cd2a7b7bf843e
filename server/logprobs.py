"""Logprobs in OpenAI's two shapes: tokens as text, and their exact bytes."""

from collections.abc import Sequence
from typing import Any

from engine.messages import TokenLogprobs
from server.tokenizer import Detokenizer


class LogprobsText:
    """Of one answer, piece by piece: one entry for every token that is counted.

    A token that ends the answer is among them, as is what a stop string cut off: so the entries
    stay beside `token_ids`. vocabulary: token id -> bytes.
    """

    def __init__(self, vocabulary: Sequence[bytes], is_chat: bool) -> None:
        self._vocabulary = vocabulary
        self._is_chat = is_chat
        self._detokenizer = Detokenizer(vocabulary)
        self._num_characters = 0

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` of the next tokens."""
        if self._is_chat:
            return self._chat(token_ids, logprobs)
        return self._completion(token_ids, logprobs)

    def _chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._entry(token_id, named.logprob)
            | {"top_logprobs": [self._entry(*likely) for likely in named.top]}
            for token_id, named in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [named.logprob for named in logprobs],
            "top_logprobs": [
                self._likeliest(token_id, named)
                for token_id, named in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": [self._offset(token_id) for token_id in token_ids],
        }

    def _likeliest(self, token_id: int, named: TokenLogprobs) -> dict[str, float]:
        """By text, the chosen token always among them."""
        found: dict[str, float] = {}
        for likely, logprob in (*named.top, (token_id, named.logprob)):
            # Pieces of characters have one text between them: the likeliest has it.
            found.setdefault(self._text(likely), logprob)
        return found

    def _offset(self, token_id: int) -> int:
        """Characters of the answer before this token."""
        offset = self._num_characters
        self._num_characters += len(self._detokenizer.push([token_id]))
        return offset

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        # Null where a token has no bytes, as special ones.
        return {
            "token": self._text(token_id),
            "logprob": logprob,
            "bytes": list(self._bytes(token_id)) or None,
        }

    def _text(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8", "replace")

    def _bytes(self, token_id: int) -> bytes:
        # A model may have more logits than its tokenizer has tokens.
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""


def extend(logprobs: dict[str, Any], more: dict[str, Any]) -> None:
    """Add those of the tokens that follow, of the same shape."""
    for name, entries in more.items():
        if isinstance(entries, list):
            logprobs[name] += entries
