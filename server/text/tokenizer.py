"""Text to token ids and back: the only place that knows the vocabulary as text.

Prompts go through tiktoken where it is exact (Llama 3, Qwen2, Qwen3, GPT-2; several times faster),
else through Hugging Face tokenizers (Llama 2, Mistral). Both work without Python's lock, so that a
long prompt on a thread does not hold the event loop up, and in time linear in the text.
Outputs are the bytes of tokens, decoded as tokens come.
"""

import codecs
import copy
import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from registry.base.text_config import text_config
from registry.errors import Invalid
from registry.formats.chat_template import ChatTemplate, content, read_json
from registry.formats.chat_template import TemplateError as TemplateError
from server.text.json_object import JsonObject
from server.text.template_process import ConfinedTemplate, TemplateProcess
from server.text.text_length import NFC_FACTOR, most_bytes_per_token
from server.text.tiktoken_encoding import NotExact, TiktokenEncoding
from server.text.vocabulary import ExtendedVocabulary, converter, read_vocabulary
from server.text.vocabulary import UnsupportedTokenizer as UnsupportedTokenizer

logger = logging.getLogger(__name__)


class Tokenizer:
    """The tokenizer of a model folder. Raises UnsupportedTokenizer, ValueError.

    eos_token_ids: every id that ends an answer.   vocabulary: token id -> its bytes in an answer.
    added_tokens: ids of tokens that are found in a text before it is split.
    chat_template: renders the prompts of chats.
    response_template: how the model writes calls and reasoning, if its files say so.
    most_bytes_per_token: UTF-8 bytes of text that a token has at most; None if that is not known.
    """

    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise UnsupportedTokenizer(f"{path} is missing: only fast tokenizers are served")
        definition = read_json(path)
        try:
            self._hf = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise UnsupportedTokenizer(f"{path} is no tokenizer: {error}") from error
        self._hf.no_truncation()
        self._hf.no_padding()
        for token in definition.get("added_tokens", []):
            # Reading closes gaps between ids, so the file's ids may differ.
            token["id"] = self._hf.token_to_id(token["content"])
        self._added = {token["content"]: token for token in definition.get("added_tokens", [])}
        self.vocabulary: Sequence[bytes] = read_vocabulary(definition)
        self._bytes_of = converter(definition)
        self.most_bytes_per_token = most_bytes_per_token(definition)
        config = read_json(model_dir / "tokenizer_config.json")
        try:
            self.chat_template = ChatTemplate.load(model_dir, config)
        except TemplateError as error:
            raise UnsupportedTokenizer(f"its chat template does not parse: {error}") from error
        self.response_template = config.get("response_template")
        self.eos_token_ids = _eos_token_ids(model_dir, self._hf, config)
        self._prefix, self._suffix = _around_text(self._hf)
        self._tiktoken = _tiktoken(definition, self._hf)

    @property
    def added_tokens(self) -> dict[str, int]:
        return {text: token["id"] for text, token in self._added.items()}

    @property
    def special_words(self) -> dict[int, bytes]:
        """Special tokens as they are written, by id; `vocabulary` has no bytes for them."""
        return {t["id"]: text.encode() for text, t in self._added.items() if t["special"]}

    def with_own(self, own: JsonObject, templates: TemplateProcess) -> "Tokenizer":
        """Make a tokenizer with what an adapter's has of its own; it shares the vocabulary.

        own: as `registry.formats.own_tokenizer` found it.   templates: renders its chat template.
        Raises Invalid if it was compared with another tokenizer than this.
        """
        made = copy.copy(self)
        made.eos_token_ids = tuple(sorted({*self.eos_token_ids, *own.get("eos_token_ids", ())}))
        if added := own.get("added_tokens"):
            made._add(added)
        if "chat_template" in own or "special_tokens" in own:
            special = {**self.chat_template.special_tokens, **own.get("special_tokens", {})}
            made.chat_template = (
                ConfinedTemplate(own["chat_template"], special, templates)
                if "chat_template" in own
                else self.chat_template.with_special_tokens(special)
            )
        return made

    @property
    def is_confined(self) -> bool:
        """Whether its chats are rendered in another process, for which no stream may wait."""
        return isinstance(self.chat_template, ConfinedTemplate)

    def _add(self, tokens: Sequence[JsonObject]) -> None:
        """Add tokens to those of the file, or give these other properties."""
        self._added = self._added | {token["content"]: token for token in tokens}
        base, self._hf = self._hf, HFTokenizer(self._hf.model)
        self._hf.normalizer, self._hf.pre_tokenizer = base.normalizer, base.pre_tokenizer
        self._hf.post_processor, self._hf.decoder = base.post_processor, base.decoder
        in_order = sorted(self._added.values(), key=lambda token: token["id"])
        for is_special, group in itertools.groupby(in_order, key=lambda token: token["special"]):
            add = self._hf.add_special_tokens if is_special else self._hf.add_tokens
            add([_added_token(token) for token in group])
        if any(self._hf.token_to_id(token["content"]) != token["id"] for token in tokens):
            raise Invalid(
                "The base model's tokenizer is another than when this adapter was uploaded; upload "
                "the adapter again.",
                code="adapter_incompatible",
                param="model",
            )
        # Splitting at more tokens is Hugging Face's, which does it exactly.
        self._tiktoken = None
        words = {t["id"]: b"" if t["special"] else self._bytes_of(t["content"]) for t in tokens}
        self.vocabulary = ExtendedVocabulary(self.vocabulary, words)
        longest = max(len(token["content"].encode()) for token in tokens)
        if any(token["lstrip"] or token["rstrip"] for token in tokens):
            self.most_bytes_per_token = None
        elif self.most_bytes_per_token is not None:
            self.most_bytes_per_token = max(self.most_bytes_per_token, NFC_FACTOR * longest)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. A rendered chat has its special tokens already, so its caller has none added.

        Special tokens are recognized wherever they stand, even in a user's text, as in vLLM and
        TGI, and in transformers unless it is told otherwise (sanitize_control_tokens, since 5).
        """
        if self._tiktoken is not None and self._tiktoken.takes(text):
            ids = self._tiktoken.encode(text)
        else:
            # A batch of one: `encode` would keep Python's lock, and compute offsets for nothing.
            ids = self._hf.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, found without tokenizing it."""
        if self.most_bytes_per_token is None:
            return 0
        # UTF-8 has at least a byte for every character; most texts are known to fit by that alone.
        return -(-len(text.encode()) // self.most_bytes_per_token)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with special tokens written out."""
        return self._hf.decode(list(token_ids), skip_special_tokens=False)

    def token_text(self, token_id: int) -> str | None:
        """A token as tokenizer.json writes it; None for an id without a token."""
        return self._hf.id_to_token(token_id)

    @property
    def chat_format(self) -> JsonObject:
        """All that the prompts of chats and the reading of their answers depend on, as JSON."""
        return {
            "templates": dict(self.chat_template.sources),
            "special_tokens": dict(self.chat_template.special_tokens),
            "response_template": self.response_template,
            "eos_token_ids": list(self.eos_token_ids),
        }


class Detokenizer:
    """The text of one output, as its tokens arrive; never half a character.

    The text is that which follows the prompt, as in vLLM and TGI: if the first token is a word with
    a space before it, as after "[/INST]", the text begins with that space. (Decoding the output
    alone drops the space, as transformers' streamer does, and the others where a prompt has no
    text.) Bytes that are not UTF-8 become one U+FFFD for every broken character; ByteFallback's own
    decoder also writes one for every byte beside them.
    shown: texts of special tokens that are to be seen.
    """

    def __init__(
        self, vocabulary: Sequence[bytes], shown: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        self._vocabulary = vocabulary
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int], *, final: bool = False, cut_bytes: int = 0) -> str:
        """The text that these tokens add.

        cut_bytes: bytes to leave out at the end, which belong to a stop string or follow it.
        """
        data = self.bytes_of(token_ids)
        return self._decoder.decode(data[: len(data) - cut_bytes], final)

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        known, shown = self._vocabulary, self._shown
        return b"".join([shown.get(i) or known[i] for i in token_ids if i < len(known)])


def _added_token(token: JsonObject) -> AddedToken:
    flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(token["content"], special=token["special"], **flags)


def _eos_token_ids(model_dir: Path, hf: HFTokenizer, config: JsonObject) -> tuple[int, ...]:
    """Every id that ends an answer, from all the files in which models say so."""
    found: set[int] = set()
    of_model = text_config(read_json(model_dir / "config.json"))
    for settings in (read_json(model_dir / "generation_config.json"), of_model):
        value = settings.get("eos_token_id")
        found |= set(value) if isinstance(value, list) else {value} if value is not None else set()
    named = hf.token_to_id(content(config.get("eos_token")) or "")
    return tuple(sorted(found | ({named} if named is not None else set())))


def _around_text(hf: HFTokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that a post-processor puts before and after a text."""
    bare = hf.encode("a", add_special_tokens=False).ids
    whole = hf.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _tiktoken(definition: JsonObject, hf: HFTokenizer) -> TiktokenEncoding | None:
    try:
        encoding = TiktokenEncoding(definition, hf)
    except NotExact as reason:
        logger.info("prompts are tokenized by Hugging Face tokenizers, not tiktoken: %s", reason)
        return None
    logger.info("prompts are tokenized by tiktoken")
    return encoding
