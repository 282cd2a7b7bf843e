"""Parser of strict JSON: no duplicate keys, no NaN, no deep nesting."""

import json
import re
from typing import Any

from registry.errors import InvalidAdapter, shown

MAX_DEPTH = 4
"""Limit of nesting; a safetensors header has 3 levels, PEFT's deepest option 3."""

# The quantifiers are possessive, so that an unclosed quote is not retried from every position.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)


def parse_object(raw: bytes, *, param: str, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Parse the JSON object in `raw`. Raises InvalidAdapter with `param`, the name of its source.

    max_depth: limit of nested objects and arrays. The caller bounds the size of `raw`.
    """
    if _is_deeper(raw, max_depth):
        message = f"{param} nests objects and lists more than {max_depth} deep; send the file as "
        raise InvalidAdapter(f"{message}PEFT wrote it.", code="invalid_json", param=param)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                message = f"{param} has the key {shown(key)} twice; keep one of them."
                raise InvalidAdapter(message, code="duplicate_key", param=param)
            result[key] = value
        return result

    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_constant
        )
    # UnicodeDecodeError, JSONDecodeError and integers of too many digits are all ValueErrors.
    except ValueError:
        raise _not_json(param) from None
    if not isinstance(value, dict):
        raise _not_json(param)
    return value


def _is_deeper(raw: bytes, max_depth: int) -> bool:
    """Whether the nesting is too deep; counted before parsing, since the parser recurses."""
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(raw):
        if token[0] in b"[{":
            depth += 1
            if depth > max_depth:
                return True
        elif token[0] in b"]}":
            depth -= 1
    return False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _not_json(param: str) -> InvalidAdapter:
    message = f"{param} does not hold a JSON object; send the file as PEFT wrote it."
    return InvalidAdapter(message, code="invalid_json", param=param)
