"""A constraint that every answer must have, as the request demands it."""

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from registry.errors import Invalid

WHITESPACE_PARAM = "structured_outputs.whitespace_pattern"
_SPACE = r"(?:[ \t\n\r]|\\[ntr]|\\x(?:20|0[9adAD]))"
_WHITESPACE = re.compile(rf"(?:{_SPACE}|\[{_SPACE}+\]|[()|*+?]|\{{\d+(?:,\d*)?\}})+")
"""Expressions that match nothing but the whitespace of JSON."""
MAX_BYTES = {"json": 64 << 10, "regex": 8 << 10, "choice": 64 << 10, "lark": 64 << 10}


@dataclass(frozen=True, slots=True)
class Constraint:
    """text: a JSON schema, an expression, a JSON list of texts, or a grammar in Lark's form.

    param: the path of the parameter that has it. A text that is too long raises Invalid.
    whitespace: an expression for the whitespace between the tokens of JSON; else it is bounded.
    """

    kind: Literal["json", "regex", "choice", "lark"]
    text: str
    param: str
    whitespace: str | None = None

    def __post_init__(self) -> None:
        if len(self.text.encode()) > MAX_BYTES[self.kind]:
            raise self.fault(f"it may have {MAX_BYTES[self.kind]} bytes at most")

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.kind} {self.whitespace} {self.text}".encode()).digest()

    def fault(self, why: str) -> Invalid:
        return Invalid.at(self.param, why)


def is_whitespace(pattern: str) -> bool:
    """Whether an expression matches nothing but the whitespace of JSON."""
    return _WHITESPACE.fullmatch(pattern) is not None
