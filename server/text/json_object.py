"""JSON objects of any content; code that reads them checks them."""

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
