"""The search for the part of a schema that llguidance refuses: its errors have no path.

A subschema is taken out. If the error goes or changes, the fault is in the subschema.
"""

import time
from collections.abc import Callable
from typing import Any

from server.shapes.schema import LISTS, MAPS, SINGLE, Place

MAX_COMPILATIONS = 100
MAX_SEARCH_S = 0.5
"""Processor time after which the search ends with what it has found."""
_Part = tuple[Any, Any, Place]
"""What a subschema is in, its key there, and the steps to it."""


def find_fault(schema: Any, flaw: str, flaw_of: Callable[[Any], str | None]) -> Place:
    """The innermost place found at fault; () is the root.   flaw_of: why a schema is refused."""
    deadline, compilations = time.thread_time() + MAX_SEARCH_S, 0
    place: Place = ()

    def is_mended(parts: list[_Part]) -> bool:
        nonlocal compilations
        compilations += 1
        if compilations > MAX_COMPILATIONS or time.thread_time() > deadline:
            raise TimeoutError
        before = [holder[key] for holder, key, _ in parts]
        for holder, key, steps in parts:
            # A branch that is true would make the others of an anyOf vanish.
            holder[key] = steps[0] != "anyOf"
        found = flaw_of(schema)
        for (holder, key, _), part in zip(parts, before, strict=True):
            holder[key] = part
        return found != flaw

    try:
        inner = schema
        while (parts := _subschemas(inner)) and is_mended(parts):
            while len(parts) > 1:
                half = parts[: len(parts) // 2]
                parts = half if is_mended(half) else parts[len(half) :]
            if not is_mended(parts):
                break
            [(holder, key, steps)] = parts
            place, inner = (*place, *steps), holder[key]
        keywords = dict(inner)
        # Structure is seldom at fault itself, so it is tried last.
        for keyword in sorted(keywords, key=lambda name: name in ("type", *MAPS, *SINGLE)):
            del inner[keyword]
            if is_mended([]):
                return (*place, keyword)
            inner.clear()
            inner.update(keywords)
    except TimeoutError:
        pass
    return place


def _subschemas(schema: dict[str, Any]) -> list[_Part]:
    """The subschemas directly in a schema that are not booleans, definitions first."""
    found: list[_Part] = []
    for keyword in (*MAPS, *LISTS):
        inner = schema.get(keyword, ())
        keys = inner if isinstance(inner, dict) else range(len(inner))
        found += [(inner, key, (keyword, key)) for key in keys]
    found += [(schema, key, (key,)) for key in SINGLE if key in schema]
    return [part for part in found if isinstance(part[0][part[1]], dict)]
