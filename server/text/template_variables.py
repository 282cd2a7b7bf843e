"""Variables that requests give to chat templates: checked, and matched to what a template reads."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from registry.errors import Invalid

MAX_BYTES = 64 << 10
"""All variables of a request together, as JSON."""
_MAX_NUMBER = 1_000_000
"""A template may repeat a text a number of times."""
_SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates switch reasoning on and off."""
_EFFORT = "reasoning_effort"
_SET_BY_SERVER = frozenset({
    "add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message",
    "conversation", "documents", "messages", "padding", "return_dict", "return_tensors",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class TemplateVariable:
    """A variable of a chat template.   param: the path of the field that gives it."""

    name: str
    value: Any
    param: str


def check_variables(variables: Sequence[TemplateVariable]) -> None:
    """Check what can be told without the template. Raises Invalid."""
    seen: dict[str, TemplateVariable] = {}
    for each in variables:
        if each.name in _SET_BY_SERVER or each.name.endswith("_token"):
            raise Invalid.at(each.param, "the server sets this variable itself; leave it out")
        other = seen.setdefault(each.name, each)
        if other.value != each.value:
            raise Invalid.at(each.param, f"{other.param} has another value; send one only")
        if any(abs(number) > _MAX_NUMBER for number in _numbers(each.value)):
            raise Invalid.at(each.param, f"numbers may be {_MAX_NUMBER} at most")
    if variables and size_bytes(variables) > MAX_BYTES:
        raise Invalid.at(variables[0].param, f"variables may have {MAX_BYTES} bytes in all at most")


def size_bytes(variables: Sequence[TemplateVariable]) -> int:
    """The variables' size as JSON."""
    return sum(len(json.dumps(each.value).encode()) for each in variables)


def granted(
    variables: Sequence[TemplateVariable], names: Collection[str], *, reasons: bool
) -> dict[str, Any]:
    """The values for a template that reads these names. Raises Invalid for what it does not read.

    An effort is a switch for a template that has a switch alone. To switch reasoning off asks for
    nothing if the model does not reason.   reasons: whether it does.
    """
    given: dict[str, Any] = {}
    for each in variables:
        name, value = each.name, each.value
        if name == _EFFORT and name not in names:
            name = next((switch for switch in _SWITCHES if switch in names), name)
            value = value != "none" if name != _EFFORT else value
        if name in names:
            if given.setdefault(name, value) != value:
                raise Invalid.at(each.param, f"{name} asks for the opposite; send one only")
        elif reasons or not _is_off(each):
            known = f"; it reads {', '.join(sorted(names))}" if names else " or any other"
            raise Invalid(
                f"{each.param}: the model's chat template does not read this variable{known}.",
                param=each.param,
                code="unsupported_parameter",
            )
    return given


def _is_off(variable: TemplateVariable) -> bool:
    off = {_EFFORT: "none", **dict.fromkeys(_SWITCHES, False)}
    return variable.name in off and bool(variable.value == off[variable.name])


def _numbers(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        return [number for each in value.values() for number in _numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, int | float) else []
