"""The names of base models by their revisions and variants, which usage and adapters are stored
with.

A name survives a replacement of the weights, and prices are by name.
"""

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.errors import NotFound
from registry.tables import adapter_versions
from server.billing.tables import base_revisions
from server.database.upsert import put


def name_base(conn: Connection, base_revision: str, base_model: str) -> None:
    """Record the name under which a gateway serves a revision; a later name replaces it.

    base_revision: or a variant, which is a digest too.
    """
    named = {"base_revision": base_revision, "base_model": base_model}
    put(conn, base_revisions, named, "base_model")


def check_base(conn: Connection, base_model: str, coming: Collection[str] = ()) -> None:
    """Raise NotFound unless a base model of this name was served, or is coming."""
    known = {*coming, *conn.scalars(sa.select(base_revisions.c.base_model))}
    if base_model not in known:
        message = f"There is no base model {base_model!r}; there are: {', '.join(sorted(known))}."
        raise NotFound(message, code="base_model_not_found", param="base_model")


def bases_of(conn: Connection, adapter_ids: Collection[str]) -> dict[str, str]:
    """Return {adapter_id: name of its newest version's base model}, where the name is known."""
    version = adapter_versions.c
    newest = sa.select(version.adapter_id, sa.func.max(version.version).label("version"))
    newest = newest.where(version.adapter_id.in_(adapter_ids)).group_by(version.adapter_id)
    found = newest.subquery()
    is_newest = (version.adapter_id == found.c.adapter_id) & (version.version == found.c.version)
    query = (
        sa.select(version.adapter_id, base_revisions.c.base_model)
        .join(found, is_newest)
        .join(base_revisions, base_revisions.c.base_revision == version.base_variant)
    )
    return {row.adapter_id: row.base_model for row in conn.execute(query)}
