"""The most text that one token can stand for, where a tokenizer drops or shortens no text.

With it a text that is too long for a model is known by its bytes, before it is tokenized.
"""

from server.text.json_object import JsonObject
from server.text.vocabulary import BYTE_ALPHABET, read_vocabulary, steps_of

NFC_FACTOR = 3
"""Times by which NFC may shorten a text's UTF-8: three letters of Hangul, of 3 bytes each, become
one syllable of 3 bytes.
"""
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def most_bytes_per_token(definition: JsonObject) -> int | None:
    """UTF-8 bytes of text that a token has at most; None if the tokenizer may drop text.

    definition: of tokenizer.json.
    """
    steps = [
        *steps_of(definition.get("normalizer"), "normalizers"),
        *steps_of(definition.get("pre_tokenizer"), "pretokenizers"),
    ]
    model, added = definition["model"], definition.get("added_tokens", [])
    if not all(map(_keeps_text, steps)) or not _knows_every_byte(model, steps):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    longest = max(map(len, read_vocabulary(definition)), default=0)
    names = (len(token["content"].encode()) for token in added)
    factor = NFC_FACTOR if any(step["type"] == "NFC" for step in steps) else 1
    return factor * max(longest, *names, 1)


def _keeps_text(step: JsonObject) -> bool:
    """Whether no text is lost in a step, nor shortened by more than NFC does it."""
    match step:
        case {"type": "NFC" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(new)}:
            return bool(new)
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"
    return False


def _knows_every_byte(model: JsonObject, steps: list[JsonObject]) -> bool:
    """Whether each byte of a text is in a token. One unknown token may stand for a long text."""
    if any(step["type"] == "ByteLevel" for step in steps):
        return set(BYTE_ALPHABET).issubset(model["vocab"])
    return bool(model.get("byte_fallback")) and _BYTE_TOKENS.issubset(model["vocab"])
