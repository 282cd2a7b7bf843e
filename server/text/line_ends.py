"""JSON on one line for every reader: httpx and str.splitlines end lines where Unicode does."""

_ESCAPES = tuple((chr(code), f"\\u{code:04x}") for code in (0x85, 0x2028, 0x2029))
"""Line ends that JSON allows unescaped in strings, with their escapes."""


def one_line(json: str) -> str:
    """The same JSON value, with the line ends in its strings escaped."""
    if not json.isascii():
        for character, escape in _ESCAPES:
            json = json.replace(character, escape)
    return json
