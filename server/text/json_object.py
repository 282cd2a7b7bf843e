"""JSON objects, as they come in and go out; what is in them is checked where it is read."""

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
