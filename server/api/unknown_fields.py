"""Fields that no request has: refused, or left out and named by a header of the answer."""

import re
from typing import Annotated

from fastapi import Depends, Header, Request

from server.api.deps import InferenceKey
from server.api.request_objects import RequestObject

_MAX_SHOWN = 16
"""Ignored fields that the header names; more are counted."""
_ODD = re.compile(r"[^\w.$-]", re.ASCII)


async def _ignores_unknown(
    identity: InferenceKey,
    ignores: Annotated[bool | None, Header(alias="X-Chorale-Ignore-Unknown-Fields")] = None,
) -> bool:
    """Whether unknown fields are left out: as the request says, else as its tenant is set."""
    return identity.ignores_unknown_fields if ignores is None else ignores


IgnoresUnknown = Annotated[bool, Depends(_ignores_unknown)]


def tell_ignored(request: Request, asked: RequestObject) -> None:
    """Have the answer's header `x-chorale-ignored-fields` name what was left out of a request."""
    if asked.ignored:
        names = [_ODD.sub("?", path) for path in asked.ignored[:_MAX_SHOWN]]
        if (more := len(asked.ignored) - _MAX_SHOWN) > 0:
            names.append(f"and {more} more")
        request.state.answer_headers = {"x-chorale-ignored-fields": ", ".join(names)}
