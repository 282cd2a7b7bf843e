"""Patterns of JSON Schema, which are JavaScript's, in the syntax that llguidance reads: Rust's.

If a class has all control characters, llguidance 1.9.1 takes escaped quotes and backslashes for
members, too. So each class is written without \\x00, which no answer has.
"""

import re
from typing import Any

_CHARACTER = r"\\(?:[nrtfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|(?![<>])[\W_])"
_CLASS = r"\\(?:[dDwWsS]|[pP]\{[^{}]*\})"
_TOKEN = re.compile(
    rf"""(?P<times>(?:[*+?]|{{[0-9]+(?:,[0-9]*)?}})\??) | (?P<name>\(\?P?<(?![=!])[^>]*>)
      | \[(?P<no>\^?+)(?P<set>(?:{_CHARACTER}|{_CLASS}|[^\]\\])+)\]
      | (?P<class>{_CLASS}) | (?P<character>{_CHARACTER}) | (?P<dot>\.)
      | (?P<unknown>\(\?(?!:|<?[=!]|i[:)]) | \[ | \\(?![bB])) | .""",
    re.DOTALL | re.VERBOSE,
)
_ONE = rf"({_CHARACTER}|[^\\])"
_ITEM = re.compile(rf"{_ONE}-{_ONE}|({_CLASS}|{_CHARACTER}|.)", re.DOTALL)
_CLASSES = {
    r"\d": "0-9", r"\D": "[^0-9]", r"\w": "0-9A-Za-z_", r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\s\uFEFF--\x85]", r"\S": r"[^[\s\uFEFF--\x85]]",
}  # fmt: skip
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LEAP_DAYS = f"^{_LEAP_YEAR}|-(?:0[13-9]|1[0-2])-|-02-(?:[01]|2[0-8])"
_NO_LEAP_SECOND = ":[0-5][0-9]:[0-5]"
_LABEL = r"(?:[^.]{1,3}|[^.]{2}(?:-[^-.]|[^-.][^.])[^.]{0,59})"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*$"
BESIDE_FORMAT: dict[str, list[dict[str, Any]]] = {
    "date": [{"pattern": _LEAP_DAYS}], "time": [{"pattern": _NO_LEAP_SECOND}],
    "date-time": [{"pattern": _LEAP_DAYS}, {"pattern": _NO_LEAP_SECOND}],
    "hostname": [{"pattern": f"^{_HOST}", "maxLength": 253}],
    "email": [{"pattern": rf"^[^@]{{1,64}}@(?:\[|{_HOST})", "maxLength": 254}],
}  # fmt: skip
"""Demands beside formats, as llguidance has 29 February in any year, any leap second, and names of
any length. Labels whose third and fourth characters are hyphens are left out: they are encoded.
"""


def rust_pattern(pattern: str) -> str:
    """The pattern in Rust's syntax. Raises ValueError, which says what to change."""
    written, before = "", None
    for found in _TOKEN.finditer(pattern):
        kind, token = found.lastgroup, found[0]
        if kind == "unknown" or (kind == "times" and before == kind):
            part = pattern[found.start() :][:9]
            raise ValueError(f"{part} is not supported; write it as JavaScript does with flag u")
        if kind == "name":
            token = "(?:"  # llguidance takes a group named stop for a look-ahead
        elif kind == "dot":
            token = _written_set("^", r"\n\r\u2028\u2029")
        elif kind in ("set", "class"):
            token = _written_set(found["no"] or "", found["set"] or token)
        elif kind == "character":
            token = _written(token)
        written, before = written + token, kind
    return written


def _written_set(no: str, items: str) -> str:
    written = ""
    for low, high, one in _ITEM.findall(items):
        written += f"{_written(low)}-{_written(high)}" if low else _written(one)
    return f"[[{no}{written}]--\\x00]"


def _written(item: str) -> str:
    """A character or a class. To Rust && is a sign in a class, and \\< the start of a word."""
    is_sign = re.fullmatch(r"\\?[\W_]", item, re.DOTALL)
    return re.escape(item[-1]) if is_sign else _CLASSES.get(item, item)
