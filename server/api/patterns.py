"""The patterns of texts in requests, each with the words in which an error tells of it."""

from collections.abc import Mapping
from typing import Any

WORDS = {
    r"^[0-9]{1,7}(\.[0-9]{1,9})?$": "Give dollars below ten millions in digits, such as 12.50",
    r"^[!-~]+$": "Give visible ASCII characters without spaces",
    r"^[!-~]*$": "Give visible ASCII characters without spaces",
    r"^[ -~]+$": "Give ASCII characters that can be printed",
    r"^[A-Za-z0-9][A-Za-z0-9._@/:+-]*$": "Give a model's name: letters, digits and . _ @ / : + -",
    "^[A-Za-z0-9_-]{1,64}$": "Give 1 to 64 letters, digits, _ and -",
    "^[A-Za-z][A-Za-z0-9_]{0,63}$": "Give 1 to 64 letters, digits and _, a letter first",
    r"\S": "Give a text that is not only spaces",
    r"^[^\x00]*$": "Give a text without the character U+0000",
    r"^[0-9a-f]{64}$": "Give a SHA-256 as 64 hex digits in small letters",
    r"^(0|[1-9][0-9]{0,8})$": 'Give a token id in digits, such as "50"',
}


def said(fault: Mapping[str, Any]) -> str:
    """Tell a fault that pydantic found, in words where it names a pattern."""
    return WORDS.get(fault.get("ctx", {}).get("pattern"), str(fault["msg"]))
