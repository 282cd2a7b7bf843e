"""tiktoken in place of Hugging Face tokenizers, where both give the same ids for every text.

Both split a text at added tokens, split the rest by a pattern, and merge bytes in every piece.
Their merging differs: tiktoken looks a whole piece up first, and merges any neighbours whose union
is a token, whether or not the model lists that merge. The ids are the same nonetheless if
`_check_merges` passes:

A span of a piece that no merge has crossed has had the same merges as it would have had alone. So
if a token can be merged from its own bytes at all, its last two parts are the same in every piece,
and since the model's merges reach the token, these parts are one of the model's merges. If the
token cannot be merged from its bytes, no piece has two neighbours whose union it is, provided that
every way to cut it into two tokens is one of the model's merges.
"""

from itertools import pairwise

import tiktoken
from tokenizers import Tokenizer as HFTokenizer

from server.text.json_object import JsonObject
from server.text.vocabulary import BYTE_ALPHABET, byte_level

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
# Every other pattern may mean something else to tiktoken's regex engine, or leave text unmatched,
# which tiktoken drops. These have been compared on every character.
PATTERNS = (GPT2, LLAMA3, QWEN2)

BLANK_BLOCK = 1 << 14
"""Characters of a block. A text with a block of blanks, as in every run of two blocks, goes to
Hugging Face: tiktoken's regex engine keeps a way back for every blank, and at 999,999 it panics or
raises."""


class NotExact(Exception):
    """The reason why tiktoken could give other ids than the model's tokenizer."""


class TiktokenEncoding:
    """A tokenizer that gives the same ids as the model's. Raises NotExact where it would not.

    definition: of tokenizer.json.   hf: the tokenizer read from it.
    """

    def __init__(self, definition: JsonObject, hf: HFTokenizer) -> None:
        model = definition["model"]
        added = definition.get("added_tokens", [])
        _check_model(model)
        _check_normalizer(definition.get("normalizer"))
        _check_added_tokens(added, has_normalizer=hf.normalizer is not None)
        pattern = _pattern(definition.get("pre_tokenizer"))
        special = {token["content"]: token["id"] for token in added}
        # Tokens with characters outside BYTE_ALPHABET never match: byte-level text has only these.
        vocab = {
            token: token_id
            for token, token_id in model["vocab"].items()
            if token not in special and BYTE_ALPHABET.keys() >= set(token)
        }
        _check_merges(model, vocab, hf)
        # Ranks are the model's ids, so that the result needs no translation.
        ranks = {byte_level(token): token_id for token, token_id in vocab.items()}
        self._encoding = tiktoken.Encoding(
            "model", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        self._normalizer = hf.normalizer

    def takes(self, text: str) -> bool:
        """Whether tiktoken gives this text the same ids as the model's tokenizer, in one go."""
        if any(text[i : i + BLANK_BLOCK].isspace() for i in range(0, len(text), BLANK_BLOCK)):
            return False
        # The model's own normalizer decides: Python's has another Unicode version. All parts of a
        # normalized text are normalized, so that it does not matter where added tokens cut it.
        ready = self._normalizer is None or text.isascii()
        return ready or self._normalizer.normalize_str(text) == text

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")


def _check_model(model: JsonObject) -> None:
    """Check that the model is plain byte-level BPE. Raises NotExact."""
    extras = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(model.get(name) for name in (*extras, "byte_fallback")):
        raise NotExact("it is no plain byte-level BPE")


def _check_normalizer(normalizer: JsonObject | None) -> None:
    if normalizer and normalizer["type"] != "NFC":
        raise NotExact(f"it has the normalizer {normalizer['type']}")


def _check_added_tokens(added: list[JsonObject], *, has_normalizer: bool) -> None:
    """Check that added tokens match anywhere, in one pass, one per place. Raises NotExact."""
    if any(token["single_word"] or token["lstrip"] or token["rstrip"] for token in added):
        raise NotExact("its added tokens depend on what stands beside them")
    passes = {bool(token["normalized"]) for token in added}
    if len(passes) > 1 or has_normalizer and True in passes:
        raise NotExact("its added tokens are looked for in normalized text")
    names = sorted(token["content"] for token in added)
    if any(longer.startswith(name) for name, longer in pairwise(names)):
        raise NotExact("an added token begins with another")


def _pattern(pre_tokenizer: JsonObject | None) -> str:
    """The one regular expression that splits text before byte-level BPE. Raises NotExact."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    patterns: list[str] = []
    for step in steps:
        match step:
            case {
                "type": "Split",
                "pattern": {"Regex": str(regex)},
                "behavior": "Isolated",
                "invert": False,
            }:
                patterns.append(regex)
            case {"type": "ByteLevel", "add_prefix_space": False}:
                patterns += [GPT2] if step.get("use_regex", True) else []
            case _:
                raise NotExact("it does not split text by one pattern")
    if len(patterns) != 1 or patterns[0] not in PATTERNS or steps[-1]["type"] != "ByteLevel":
        raise NotExact("the pattern that it splits text by is not known to be the same in both")
    return patterns[0]


def _check_merges(model: JsonObject, vocab: dict[str, int], hf: HFTokenizer) -> None:
    """Check that merging by id is merging by the model's list (see above). Raises NotExact."""
    if not BYTE_ALPHABET.keys() <= vocab.keys():
        raise NotExact("it has no token for some bytes")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    results = [model["vocab"][left + right] for left, right in merges]
    if len(set(merges)) < len(merges) or any(a > b for a, b in pairwise(results)):
        raise NotExact("its merges are not in the order of its ids")
    known, looks_up = set(merges), bool(model.get("ignore_merges"))
    for token in _unreachable(vocab, hf):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        whole = all(cut in known for cut in cuts if cut[0] in vocab and cut[1] in vocab)
        if not (looks_up and whole):
            raise NotExact("a token of its vocabulary cannot be merged from its bytes")


def _unreachable(vocab: dict[str, int], hf: HFTokenizer) -> list[str]:
    """Tokens that the model's merges do not make from the tokens' own bytes."""
    looks_up = hf.model.ignore_merges
    hf.model.ignore_merges = False
    try:
        return [token for token in vocab if len(hf.model.tokenize(token)) != 1]
    finally:
        hf.model.ignore_merges = looks_up
