"""A vocabulary as bytes: the bytes that each token id adds to a text."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.text.json_object import JsonObject

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(Exception):
    """A tokenizer whose tokens cannot be written as bytes, or whose template does not parse."""


def read_vocabulary(definition: JsonObject) -> list[bytes]:
    """Token id -> its bytes; special tokens and ids without a token have none.

    definition: of tokenizer.json. A token's bytes are those that it has after other text, so a word
    of a SentencePiece vocabulary keeps its space. Raises UnsupportedTokenizer.
    """
    model = definition["model"]
    if model["type"] != "BPE":
        raise UnsupportedTokenizer(f"its model is {model['type']}; only BPE is served")
    convert = converter(definition)
    added = definition.get("added_tokens", [])
    ids = {*model["vocab"].values(), *(token["id"] for token in added)}
    table = [b""] * (max(ids, default=-1) + 1)
    for token, token_id in model["vocab"].items():
        table[token_id] = convert(token)
    for token in added:
        table[token["id"]] = b"" if token["special"] else convert(token["content"])
    return table


def converter(definition: JsonObject) -> Callable[[str], bytes]:
    """A function from a token's name to its bytes, which does what the decoder's steps do.

    definition: of tokenizer.json. Raises UnsupportedTokenizer.
    """
    steps = steps_of(definition.get("decoder"), "decoders")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_or_text
    replaced = [_replacement(step, kinds) for step in steps]
    if not any(replaced):
        raise UnsupportedTokenizer(f"its decoder {kinds} does not write tokens as bytes")

    def convert(token: str) -> bytes:
        for pair in replaced:
            token = token.replace(*pair) if pair else token
        byte = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return convert


class ExtendedVocabulary(Sequence[bytes]):
    """A vocabulary with other bytes for some ids, which may lie beyond it.   words: those bytes."""

    def __init__(self, known: Sequence[bytes], words: Mapping[int, bytes]) -> None:
        self.words = words
        self._known = known
        self._size = max(len(known), max(words) + 1)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, token_id: Any) -> Any:
        if token_id in self.words:
            return self.words[token_id]
        if token_id >= self._size:
            raise IndexError(token_id)
        return self._known[token_id] if token_id < len(self._known) else b""


def byte_level(token: str) -> bytes:
    """The bytes of a token written in BYTE_ALPHABET. Raises KeyError for other characters."""
    return bytes(map(BYTE_ALPHABET.__getitem__, token))


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""The characters in which byte-level BPE writes bytes (GPT-2's table)."""


def steps_of(part: JsonObject | None, nested: str) -> list[JsonObject]:
    """The steps of a part of tokenizer.json, in order.   nested: where a sequence has its parts."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[nested] for step in steps_of(inner, nested)]
    return [part]


def _byte_level_or_text(token: str) -> bytes:
    try:
        return byte_level(token)
    except KeyError:
        # Added tokens may have other characters; they stand for themselves.
        return token.encode()


def _replacement(step: JsonObject, kinds: list[str]) -> tuple[str, str] | None:
    """The (old, new) text that a step replaces in every token, or None. Raises UnsupportedTokenizer
    if the step does anything else.

    The space that Strip and Metaspace take from a text's start stays: see Detokenizer.
    """
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
        case {"type": "Metaspace", "replacement": str(old)}:
            return old, " "
        case {"type": "ByteFallback" | "Fuse"}:
            return None
        case {"type": "Strip", "content": " ", "stop": 0} if "Fuse" in kinds:
            return None
    raise UnsupportedTokenizer(f"its decoder's step {step['type']} does not write tokens as bytes")
