"""JSON as the standard has it: no duplicate keys, no NaN, no bottomless nesting."""

import json
from typing import Any

from registry.errors import InvalidAdapter, shown


def parse_object(raw: bytes, *, param: str) -> dict[str, Any]:
    """The JSON object in `raw`. Raises InvalidAdapter with `param` naming where it came from.

    Nesting is bounded by the interpreter's recursion limit, size by the caller.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except _DuplicateKey as error:
        raise InvalidAdapter(
            code="duplicate_key",
            message=f"{param} has the key {shown(error.key)} twice; keep one of them.",
            param=param,
        ) from None
    # UnicodeDecodeError, JSONDecodeError and integers of too many digits are all ValueErrors.
    except (ValueError, RecursionError):
        raise _not_json(param) from None
    if not isinstance(value, dict):
        raise _not_json(param)
    return value


class _DuplicateKey(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKey(key)
        result[key] = value
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _not_json(param: str) -> InvalidAdapter:
    return InvalidAdapter(
        code="invalid_json",
        message=f"{param} does not hold a JSON object; send the file as PEFT wrote it.",
        param=param,
    )
