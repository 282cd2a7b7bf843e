"""Logprobs in OpenAI's two formats: tokens as text, and their exact bytes."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from engine.wire.messages import TokenLogprobs
from server.text.json_object import JsonObject
from server.text.tokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class LogprobsText:
    """The logprobs of one answer, piece by piece: one entry for every token that is counted.

    The token that ends the answer has an entry, as have tokens that a stop string cut off, so that
    the entries match `token_ids`. vocabulary: token id -> bytes.   num_characters: length of an
    echoed prompt, which comes before the answer in its offsets.   as_ids: whether a token is named
    `token_id:N` instead of by its text.
    """

    vocabulary: Sequence[bytes]
    is_chat: bool
    num_characters: int = 0
    _: KW_ONLY
    as_ids: bool = False
    _detokenizer: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.vocabulary)

    def render(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> JsonObject:
        """The `logprobs` of the next tokens."""
        if self.is_chat:
            return self._chat(token_ids, logprobs)
        return self._completion(token_ids, logprobs)

    def _chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> JsonObject:
        content = [
            self._entry(token_id, named.logprob)
            | {"top_logprobs": [self._entry(*likely) for likely in named.top]}
            for token_id, named in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> JsonObject:
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [named.logprob for named in logprobs],
            "top_logprobs": [
                self._likeliest(token_id, named)
                for token_id, named in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": [self._offset(token_id) for token_id in token_ids],
        }

    def _likeliest(self, token_id: int, named: TokenLogprobs) -> dict[str, float]:
        """Logprobs of the likeliest tokens by text; the chosen token is always among them."""
        chosen = self._name(token_id)
        found: dict[str, float] = {}
        for likely, logprob in named.top:
            text = self._name(likely)
            # Two tokens may have the same bytes; special tokens have none.
            is_taken = text in found or (text == chosen and likely != token_id)
            found[_id_name(likely) if is_taken else text] = logprob
        found.setdefault(chosen, named.logprob)
        return found

    def _offset(self, token_id: int) -> int:
        """Characters of the answer before this token."""
        offset = self.num_characters
        self.num_characters += len(self._detokenizer.push([token_id]))
        return offset

    def _entry(self, token_id: int, logprob: float) -> JsonObject:
        # `bytes` is null for a token without bytes, such as a special one.
        return {
            "token": self._text(token_id),
            "logprob": logprob,
            "bytes": list(bytes_of(self.vocabulary, token_id)) or None,
        }

    def _name(self, token_id: int) -> str:
        return _id_name(token_id) if self.as_ids else unique_text(self.vocabulary, token_id)

    def _text(self, token_id: int) -> str:
        if self.as_ids:
            return _id_name(token_id)
        return bytes_of(self.vocabulary, token_id).decode("utf-8", "replace")


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """The logprobs of one prompt, piece by piece, in the shapes that were asked for.

    echoed: in the shape of completions, to stand before the logprobs of the answer.
    listed: vLLM's `prompt_logprobs`. Each is None if it was not asked for.
    The first token of a prompt has no logprob: null.
    """

    vocabulary: Sequence[bytes]
    token_ids: Sequence[int]
    num_echoed: int | None
    num_listed: int | None
    _: KW_ONLY
    as_ids: bool = False
    echoed: JsonObject | None = field(default=None, init=False)
    listed: list[JsonObject | None] | None = field(default=None, init=False)
    _num_taken: int = field(default=1, init=False)
    _text: LogprobsText = field(init=False)

    def __post_init__(self) -> None:
        self._text = LogprobsText(self.vocabulary, is_chat=False, as_ids=self.as_ids)
        if self.num_echoed is not None:
            self.echoed = self._text.render(self.token_ids[:1], (TokenLogprobs(logprob=0.0),))
            self.echoed |= {"token_logprobs": [None], "top_logprobs": [None]}
        if self.num_listed is not None:
            self.listed = [None]

    def take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the logprobs of the next tokens."""
        start, self._num_taken = self._num_taken, self._num_taken + len(logprobs)
        token_ids = self.token_ids[start : self._num_taken]
        if self.echoed is not None:
            named = [replace(each, top=each.top[: self.num_echoed]) for each in logprobs]
            extend(self.echoed, self._text.render(token_ids, named))
        if self.listed is not None:
            self.listed += map(self._by_id, token_ids, logprobs)

    def _by_id(self, token_id: int, named: TokenLogprobs) -> JsonObject:
        """vLLM's entry for one token."""
        shown = {token_id: (named.logprob, named.rank)}
        for rank, (likely, logprob) in enumerate(named.top[: self.num_listed], start=1):
            shown[likely] = logprob, rank
        return {
            str(shown_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": bytes_of(self.vocabulary, shown_id).decode("utf-8", "replace"),
            }
            for shown_id, (logprob, rank) in shown.items()
        }


def bytes_of(vocabulary: Sequence[bytes], token_id: int) -> bytes:
    """A token's bytes; none for an id above the tokenizer's, as a model may have more logits."""
    return vocabulary[token_id] if token_id < len(vocabulary) else b""


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def unique_text(vocabulary: Sequence[bytes], token_id: int) -> str:
    """A token's text. A token that is a piece of a character becomes its bytes, written as OpenAI
    does, so that no two such tokens look the same.
    """
    data = bytes_of(vocabulary, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def extend(logprobs: JsonObject, more: JsonObject) -> None:
    """Add the logprobs of the tokens that follow, which have the same shape."""
    for name, entries in more.items():
        if isinstance(entries, list):
            logprobs[name] += entries
