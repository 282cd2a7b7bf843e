"""Tools as a request declares them, and which of them an answer may call."""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from server.text.json_object import JsonObject

MAX_TOOLS = 128
MAX_BYTES = 128 << 10
"""All declarations of a request together, as JSON."""
_KEYWORDS = (
    "type", "title", "description", "const", "enum", "format", "pattern", "default", "properties",
    "required", "additionalProperties", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs",
)  # fmt: skip
"""Order of a schema's keywords in prompts; others follow by name."""
_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call.

    parameters: a JSON schema, its keys `ordered`; None for no parameters.
    strict: a schema that cannot be enforced is refused; otherwise the parts are that can be.
    param: the path of its declaration.
    """

    name: str
    description: str | None
    parameters: JsonObject | None
    strict: bool
    param: str

    @property
    def declared(self) -> JsonObject:
        """The tool as templates get it, with the same bytes for the same tool in any key order."""
        function: JsonObject = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or _NO_PARAMETERS
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how its answers may use them.

    mode: none for no calls, required for calls only.   allowed: names of the tools that may be
    called.   is_parallel: whether an answer may have several calls.
    """

    tools: tuple[Tool, ...]
    mode: Literal["auto", "none", "required"]
    allowed: tuple[str, ...]
    is_parallel: bool = True

    @functools.cached_property
    def size_bytes(self) -> int:
        """The bytes of all declarations, as JSON."""
        return sum(len(json.dumps(tool.declared)) for tool in self.tools)

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(repr(self).encode()).digest()

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        if self.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if tool.name in self.allowed)

    @property
    def most_calls(self) -> int | None:
        return None if self.is_parallel else 1


def ordered(schema: Any) -> Any:
    """The schema with its keys in one order. Required properties come first, as they are listed;
    their order is also that of the arguments in answers.
    """
    if not isinstance(schema, dict):
        return [ordered(inner) for inner in schema] if isinstance(schema, list) else schema
    kept: JsonObject = {}
    for key in sorted(schema, key=_rank):
        value = schema[key]
        if key in _MAPS and isinstance(value, Mapping):
            required = schema.get("required")
            listed = required if isinstance(required, list) and key == "properties" else []
            named = (n for n in listed if isinstance(n, str) and n in value)
            names = list(dict.fromkeys(named))
            kept[key] = {n: ordered(value[n]) for n in (*names, *sorted(value.keys() - set(names)))}
        elif key in ("const", "enum", "default", "examples", "required"):
            kept[key] = json.loads(json.dumps(value, sort_keys=True))
        else:
            kept[key] = ordered(value)
    return kept


def _rank(key: str) -> tuple[int, str]:
    return (_KEYWORDS.index(key) if key in _KEYWORDS else len(_KEYWORDS)), key
