"""What adapters, aliases and versions are called, and how `model` is read."""

import re
from dataclasses import dataclass

from registry.adapter_rows import LATEST
from registry.alias_rows import Canary
from registry.errors import InvalidCanary, InvalidName, ModelNotFound

_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
_IN_NAME = r"[a-z0-9._-]{0,64}"
# An alias that starts with a digit could read like a version.
_ALIAS = r"[a-z][a-z0-9._-]{0,63}"
_VERSION = r"[1-9][0-9]{0,8}"
_MODEL = re.compile(f"({_NAME})(?:@(?:({_ALIAS})|({_VERSION})))?")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A `model` taken apart. version: None where the alias says it."""

    name: str
    alias: str
    version: int | None


def parse_model(model: str) -> ModelName:
    """Read `name`, `name@alias` or `name@3`. Raises ModelNotFound: no other text is a name."""
    match = _MODEL.fullmatch(model)
    if match is None:
        raise ModelNotFound(model=model)
    if match[3]:
        return ModelName(match[1], LATEST, int(match[3]))
    return ModelName(match[1], match[2] or LATEST, None)


def is_name(text: str) -> bool:
    return re.fullmatch(_NAME, text) is not None


def could_be_in_name(text: str) -> bool:
    """Whether any name may have `text` in it; so may the empty text."""
    return re.fullmatch(_IN_NAME, text) is not None


def is_version(number: int) -> bool:
    return 1 <= number <= 999_999_999


def check_new_name(name: str, base_model_id: str) -> None:
    """Raises InvalidName."""
    if not is_name(name):
        raise InvalidName(param="name", name=name, rule=f"{_NAME} in full")
    if name == base_model_id:
        # The base model's id is matched first: this adapter could never be asked for.
        raise InvalidName(param="name", name=name, rule="a name that is not the base model's")


def check_alias(alias: str) -> None:
    """Raises InvalidName."""
    if not re.fullmatch(_ALIAS, alias):
        raise InvalidName(param="alias", name=alias, rule=f"{_ALIAS} in full")


def check_canary(version: int, canary: Canary | None) -> None:
    """Raises InvalidCanary."""
    if canary and (canary.version == version or not 1 <= canary.percent <= 99):
        raise InvalidCanary(version=version, canary_version=canary.version, percent=canary.percent)
