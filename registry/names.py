"""Syntax of the names of adapters, aliases and versions, and of `model` in requests."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from registry.adapter_rows import LATEST
from registry.alias_rows import Canary
from registry.errors import InvalidCanary, InvalidName, ModelNotFound

_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
_IN_NAME = r"[a-z0-9._-]{0,64}"
# An alias does not start with a digit, since it could be read as a version.
_ALIAS = r"[a-z][a-z0-9._-]{0,63}"
_VERSION = r"[1-9][0-9]{0,8}"
_MODEL = re.compile(f"({_NAME})(?:@(?:({_ALIAS})|({_VERSION})))?")


@dataclass(frozen=True, slots=True)
class ModelName:
    """The parts of a `model`. version: None if the alias decides the version."""

    name: str
    alias: str
    version: int | None


def parse_model(model: str) -> ModelName:
    """Read `name`, `name@alias` or `name@3`. Raises ModelNotFound for any other text."""
    match = _MODEL.fullmatch(model)
    if match is None:
        raise ModelNotFound(model=model)
    if match[3]:
        return ModelName(match[1], LATEST, int(match[3]))
    return ModelName(match[1], match[2] or LATEST, None)


def is_name(text: str) -> bool:
    return re.fullmatch(_NAME, text) is not None


def check_name(name: str, *, param: str) -> None:
    """Raise InvalidName unless the text follows the rule of names."""
    if not is_name(name):
        raise InvalidName(param=param, name=name, rule=f"{_NAME} in full")


def could_be_in_name(text: str) -> bool:
    """Whether a name may contain `text`; true for the empty text."""
    return re.fullmatch(_IN_NAME, text) is not None


def is_version(number: int) -> bool:
    return 1 <= number <= 999_999_999


def check_new_name(name: str, base_names: Collection[str]) -> None:
    """Raise InvalidName unless a new adapter may have this name.

    base_names: names of the base models.
    """
    if not is_name(name):
        raise InvalidName(param="name", name=name, rule=f"{_NAME} in full")
    if name in base_names:
        # Requests match the base models' names first, so this adapter could never be requested.
        raise InvalidName(param="name", name=name, rule="a name that is not a base model's")


def check_alias(alias: str) -> None:
    """Raise InvalidName unless the text is a valid alias."""
    if not re.fullmatch(_ALIAS, alias):
        raise InvalidName(param="alias", name=alias, rule=f"{_ALIAS} in full")


def check_canary(version: int, canary: Canary | None) -> None:
    """Raise InvalidCanary unless the canary is None or valid beside `version`."""
    if canary and (canary.version == version or not 1 <= canary.percent <= 99):
        raise InvalidCanary(version=version, canary_version=canary.version, percent=canary.percent)
