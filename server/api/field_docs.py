"""Descriptions of fields and parameters, taken from docstrings for the OpenAPI document.

A docstring explains them behind its summary, as this one does.   name: what it is.   other: ...
"""

import re
from collections.abc import Collection

from pydantic import BaseModel

from server.text.json_object import JsonObject

_ENTRY = re.compile(r"(?:^\s*|(?<=\.)\s+|\n\s*)(\w+(?:, \w+)*): ")


def descriptions(docstring: str, names: Collection[str]) -> dict[str, str]:
    """The description of each of the names that the docstring explains."""
    found: dict[str, str] = {}
    for paragraph in docstring.split("\n\n"):
        entries = [
            entry for entry in _ENTRY.finditer(paragraph) if set(entry[1].split(", ")) <= set(names)
        ]
        ends = [entry.start() for entry in entries[1:]] + [len(paragraph)]
        for entry, end in zip(entries, ends, strict=False):
            text = " ".join(paragraph[entry.end() : end].split())
            found |= dict.fromkeys(entry[1].split(", "), text[:1].upper() + text[1:])
    return found


def describe_fields(schema: JsonObject, model: type[BaseModel]) -> None:
    """Complete a model's schema, as pydantic's json_schema_extra, from its class and its bases."""
    fields = schema.get("properties", {})
    for kind in reversed(model.__mro__):
        for name, text in descriptions(kind.__doc__ or "", fields).items():
            fields[name]["description"] = text
