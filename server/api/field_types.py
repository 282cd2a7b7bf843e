"""Types of requests' fields that are tokens, words or strings, with their limits."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from registry.errors import Invalid
from server.api.request_objects import shown_key

_MAX_STOPS = 64
_MAX_STOP_BYTES = 256
_MAX_STOPS_BYTES = 4096
_MAX_BAD_WORDS = 128
_MAX_BIASES = 1024
_MAX_NAMED_KEYS = 8
"""The most keys of `logit_bias` that one error names."""
_MAX_PROMPT_TOKENS = 100_000
_TOKEN_NAME = r"^(0|[1-9][0-9]{0,8})$"


def _name_bad_keys(bias: Any) -> Any:
    """The bias, if its keys are token ids. Raises Invalid that names the other keys."""
    keys = bias if isinstance(bias, dict) else ()
    bad = [shown_key("logit_bias", key) for key in keys if not re.fullmatch(_TOKEN_NAME, key)]
    if bad:
        raise Invalid(
            f'{", ".join(bad[:_MAX_NAMED_KEYS])}: a key must be a token id, such as "50".',
            param=bad[0],
        )
    return bias


def _check_stops(stop: Any) -> Any:
    """The given value, unless it is texts beyond the limits. Raises Invalid."""
    texts = stop if isinstance(stop, list) else [stop]
    sizes = [len(text.encode()) for text in texts if isinstance(text, str)]
    if (
        len(sizes) > _MAX_STOPS
        or sum(sizes) > _MAX_STOPS_BYTES
        or (sizes and not 0 < min(sizes) <= max(sizes) <= _MAX_STOP_BYTES)
    ):
        most = f"at most {_MAX_STOPS} strings of 1 to {_MAX_STOP_BYTES} bytes are taken, and "
        most += f"{_MAX_STOPS_BYTES:,} bytes in all"
        raise Invalid.at("stop", f"{most}. Leave some out, or use stop_token_ids")
    return stop


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=_MAX_PROMPT_TOKENS)]
AllowedTokenIds = Annotated[list[TokenId], Field(max_length=_MAX_BIASES)]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=_TOKEN_NAME)],
        Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)],
    ],
    Field(max_length=_MAX_BIASES),
    BeforeValidator(_name_bad_keys),
]
# Limits in characters, for the document; _check_stops counts bytes.
_Stop = Annotated[str, Field(max_length=_MAX_STOP_BYTES)]
Stops = Annotated[
    _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS)] | None,
    BeforeValidator(_check_stops),
]
BadWords = Annotated[
    list[Annotated[str, Field(max_length=_MAX_STOP_BYTES, pattern=r"\S")]],
    Field(max_length=_MAX_BAD_WORDS),
]
