"""The search for the part of a schema that llguidance refuses: its errors have no path.

A subschema is taken out. If the error goes or changes, the fault is in the subschema. If not, it
stays out, so that of several parts with the same error one is left.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

from server.constraints.schema import LISTS, MAPS, SINGLE, Place

MAX_COMPILATIONS = 100
MAX_SEARCH_S = 0.5
"""Processor time after which the search ends with what it has found."""


def find_fault(schema: Any, flaw: str, flaw_of: Callable[[Any], str | None]) -> Place:
    """The innermost place found at fault; () is the root.   flaw_of: why a schema is refused."""
    ends, compilations = time.thread_time() + MAX_SEARCH_S, 0
    schema = copy.deepcopy(schema)
    place: Place = ()

    def is_mended(parts: list[tuple[Any, Place]]) -> bool:
        """Whether the error goes or changes without these parts; if not, they are left out."""
        nonlocal compilations
        compilations += 1
        if compilations > MAX_COMPILATIONS or time.thread_time() > ends:
            raise TimeoutError
        before = [holder[steps[-1]] for holder, steps in parts]
        for holder, steps in parts:
            # A branch that is true would make the others of an anyOf vanish.
            holder[steps[-1]] = steps[0] != "anyOf"
        if flaw_of(schema) == flaw:
            return False
        for (holder, steps), part in zip(parts, before, strict=True):
            holder[steps[-1]] = part
        return True

    try:
        inner = schema
        while (parts := _subschemas(inner)) and is_mended(parts):
            while len(parts) > 1:
                half = parts[: len(parts) // 2]
                parts = half if is_mended(half) else parts[len(half) :]
            if not is_mended(parts):
                break
            [(holder, steps)] = parts
            place, inner = (*place, *steps), holder[steps[-1]]
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


def _subschemas(schema: dict[str, Any]) -> list[tuple[Any, Place]]:
    """Find the subschemas directly in a schema: what each is in, and the steps to it.

    Definitions come first.
    """
    found: list[tuple[Any, Place]] = [(schema, (name,)) for name in SINGLE if name in schema]
    for name in (*MAPS, *LISTS)[::-1]:
        inner = schema.get(name, ())
        keys = inner if isinstance(inner, dict) else range(len(inner))
        found = [(inner, (name, key)) for key in keys] + found
    return [(holder, steps) for holder, steps in found if isinstance(holder[steps[-1]], dict)]
