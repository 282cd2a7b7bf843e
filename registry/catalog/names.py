"""Syntax of the names of adapters, aliases and versions, and of `model` in requests."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from registry.catalog.adapter_rows import LATEST
from registry.catalog.alias_rows import Canary
from registry.errors import Invalid, NotFound, shown

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
    """Read `name`, `name@alias` or `name@3`. Raises NotFound for any other text."""
    match = _MODEL.fullmatch(model)
    if match is None:
        raise model_not_found(model)
    if match[3]:
        return ModelName(match[1], LATEST, int(match[3]))
    return ModelName(match[1], match[2] or LATEST, None)


def is_name(text: str) -> bool:
    return re.fullmatch(_NAME, text) is not None


def check_name(name: str, *, param: str) -> None:
    """Raise Invalid unless the text follows the rule of names."""
    if not is_name(name):
        raise invalid_name(name, param, f"{_NAME} in full")


def could_be_in_name(text: str) -> bool:
    """Whether a name may contain `text`; true for the empty text."""
    return re.fullmatch(_IN_NAME, text) is not None


def is_version(number: int) -> bool:
    return 1 <= number <= 999_999_999


def check_new_name(name: str, base_names: Collection[str]) -> None:
    """Raise Invalid unless a new adapter may have this name.

    base_names: names of the base models.
    """
    check_name(name, param="name")
    if name in base_names:
        # Requests match the base models' names first, so this adapter could never be requested.
        raise invalid_name(name, "name", "a name that is not a base model's")


def check_alias(alias: str) -> None:
    """Raise Invalid unless the text is a valid alias."""
    if not re.fullmatch(_ALIAS, alias):
        raise invalid_name(alias, "alias", f"{_ALIAS} in full")


def check_canary(version: int, canary: Canary | None) -> None:
    """Raise Invalid unless the canary is None or valid beside `version`."""
    if canary and (canary.version == version or not 1 <= canary.percent <= 99):
        raise Invalid(
            f"{canary.percent} % to version {canary.version} beside version {version} is no "
            "canary; use percent from 1 to 99 and another version.",
            code="invalid_canary",
            param="canary",
        )


def invalid_name(name: str, param: str, rule: str) -> Invalid:
    """The fault of a name that is not allowed.   rule: what to use instead."""
    message = f"{param} {shown(name)} is not allowed; use {rule}."
    return Invalid(message, code="invalid_name", param=param)


def adapter_not_found(model: str) -> NotFound:
    """The fault of a tenant that has no adapter of this name, or no such alias or version."""
    return _not_found("adapter", model, "adapters")


def model_not_found(model: str) -> NotFound:
    """The fault of a `model` that names no adapter of the caller's, nor a base model."""
    return _not_found("model", model, "models")


def _not_found(what: str, name: str, path: str) -> NotFound:
    message = (
        f"The {what} {shown(name)} does not exist or you do not have access to it; "
        f"GET /v1/{path} lists yours."
    )
    return NotFound(message, code="model_not_found", param="model")
