"""JSON that is one line to everybody: httpx and str.splitlines end one where Unicode does."""

_ESCAPES = tuple((chr(code), f"\\u{code:04x}") for code in (0x85, 0x2028, 0x2029))
"""Those that JSON may have in a string as they are, and how it has them else."""


def one_line(json: str) -> str:
    """The same value, without line ends inside its strings."""
    if not json.isascii():
        for character, escape in _ESCAPES:
            json = json.replace(character, escape)
    return json
