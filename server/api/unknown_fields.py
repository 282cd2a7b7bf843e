"""Fields that no request has: refused, or left out and named by a header of the answer."""

import re
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Header, Request

from server.api.deps import InferenceKey

_MAX_SHOWN = 16
"""Fields that the header names; more are counted."""
_ODD = re.compile(r"[^\w.$-]", re.ASCII)


def shown_paths(paths: Sequence[str]) -> str:
    """Paths of fields for a header; characters that clients chose oddly are question marks."""
    names = [_ODD.sub("?", path) for path in paths[:_MAX_SHOWN]]
    if len(paths) > _MAX_SHOWN:
        names.append(f"and {len(paths) - _MAX_SHOWN} more")
    return ", ".join(names)


async def _ignored_fields(
    request: Request,
    identity: InferenceKey,
    ignores: Annotated[bool | None, Header(alias="X-Chorale-Ignore-Unknown-Fields")] = None,
) -> list[str] | None:
    """A list for the paths of unknown fields that are left out, which the answer's header names;
    None to refuse them: as the request says, else as its tenant is set.
    """
    if not (identity.ignores_unknown_fields if ignores is None else ignores):
        return None
    paths: list[str] = []
    request.state.ignored_fields = paths
    return paths


IgnoredFields = Annotated[list[str] | None, Depends(_ignored_fields)]
