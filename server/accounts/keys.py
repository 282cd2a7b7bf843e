"""Management of API keys: they are made, listed, changed, rotated and revoked.

A key with the scope admin gives no more than it has: scopes, limits and time. It manages itself,
the keys that it made, and the keys that those made; the operator manages all. Every change locks
the tenant first, so that no key is made, or makes another, while it is being revoked.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from registry.catalog.adapter_rows import lock_tenant
from registry.catalog.audit import in_words, record_audit
from registry.errors import Conflict, Forbidden, Invalid, NotFound, QuotaExceeded
from server.accounts import auth
from server.accounts.auth import ADMIN, SCOPES, Identity
from server.accounts.lineage import MAX_CHAIN, ApiKey, bounded_scopes, came_of, makers_of
from server.accounts.tables import api_keys
from server.limits.amounts import LIMITS

# The scope `admin` makes its holder the tenant's admin, so a key gets it only when asked for.
DEFAULT_SCOPES = SCOPES - {ADMIN}

MAX_KEYS = 1000
"""Most keys that a tenant has at a time, without those that are revoked, expired or replaced; and
most that are replaced and in their overlap.
"""
MAX_NAME = 100
MAX_OVERLAP_S = 7 * 86_400
MAX_PAGE = 1000


def create_key(
    conn: Connection,
    tenant_id: str,
    name: str,
    pepper: str,
    *,
    now_ms: int,
    by: Identity | None = None,
    scopes: frozenset[str] | None = None,
    expires_at_ms: int | None = None,
    **limits: int | None,
) -> tuple[ApiKey, str]:
    """Make a key. Returns it and its plaintext, which is stored nowhere.

    by: the key that asks; None is the operator.   scopes: by default all but admin that `by` has.
    limits: by the names of LIMITS; by default these and the expiry are those of `by`.
    Raises Invalid, Forbidden, QuotaExceeded.
    """
    lock_tenant(conn, tenant_id)
    maker = _asker(conn, tenant_id, by, now_ms)
    given = {"expires_at_ms": expires_at_ms, **limits}
    values: dict[str, Any] = {"name": name, "scopes": scopes}
    if maker is not None:
        own = {field: getattr(maker, field) for field in (*LIMITS, "expires_at_ms")}
        given = own | {field: value for field, value in given.items() if value is not None}
        if scopes is None:
            values["scopes"] = DEFAULT_SCOPES & _scopes_now(conn, maker)
    elif scopes is None:
        values["scopes"] = DEFAULT_SCOPES
    values |= given
    _check(values)
    if maker is not None:
        _check_gives(conn, maker, values)
        if any(above.revoked_at_ms is not None for above in makers_of(conn, maker.created_by)):
            raise Forbidden(
                "A key above this API key is revoked, so this key makes no keys any more."
            )
        values["created_by"] = _newest(conn, maker, now_ms)
    key, plaintext = _insert(conn, tenant_id, pepper, values, now_ms)
    detail = f"{name!r}: {' '.join(sorted(key.scopes))}"
    _audit(conn, tenant_id, key.key_id, by, "key.create", now_ms, detail)
    return key, plaintext


def get_key(conn: Connection, tenant_id: str, key_id: str) -> ApiKey:
    """A tenant's key by its id. Raises NotFound, also for another tenant's key."""
    row, is_it = None, (api_keys.c.tenant_id == tenant_id) & (api_keys.c.key_id == key_id)
    # The form is checked here, since PostgreSQL refuses some texts that cannot be an id.
    if key_id.isascii() and key_id.isalnum():
        row = conn.execute(sa.select(api_keys).where(is_it)).mappings().first()
    if row is None:
        message = f"There is no API key {key_id!r}."
        raise NotFound(message, code="key_not_found", param="key_id")
    return ApiKey.of(row)


def list_keys(
    conn: Connection,
    tenant_id: str,
    *,
    after: str | None = None,
    limit: int = MAX_PAGE,
    newest_first: bool = False,
) -> list[ApiKey]:
    """A tenant's keys after `after`, ended ones too, the oldest first. Raises NotFound."""
    query = sa.select(api_keys).where(api_keys.c.tenant_id == tenant_id)
    place = [api_keys.c.created_at_ms, api_keys.c.key_id]
    if after is not None:
        last = get_key(conn, tenant_id, after)
        places, begin = sa.tuple_(*place), sa.tuple_(sa.literal(last.created_at_ms), last.key_id)
        query = query.where(places < begin if newest_first else places > begin)
    order = [column.desc() if newest_first else column for column in place]
    rows = conn.execute(query.order_by(*order).limit(limit)).mappings()
    return [ApiKey.of(row) for row in rows]


def change_key(
    conn: Connection,
    tenant_id: str,
    key_id: str,
    changes: Mapping[str, Any],
    *,
    now_ms: int,
    by: Identity | None = None,
) -> ApiKey:
    """Change a key's fields; fields that `changes` does not name stay as they are.

    changes: may name name, scopes, expires_at_ms and LIMITS. Narrower scopes also narrow the keys
    that the key made; limits also bind the keys that it replaced. Raises NotFound, Conflict,
    Invalid, Forbidden.
    """
    lock_tenant(conn, tenant_id)
    asker = _asker(conn, tenant_id, by, now_ms)
    key = _live_key(conn, tenant_id, key_id, asker, now_ms)
    _check(changes)
    if asker is not None:
        _check_gives(conn, asker, changes)
    if changes:
        is_it = api_keys.c.key_id == key_id
        conn.execute(sa.update(api_keys).where(is_it).values(**_stored(changes)))
        if limits := {name: value for name, value in changes.items() if name in LIMITS}:
            # They count in the same buckets, which have one amount.
            query = sa.update(api_keys).where(api_keys.c.bucket_id == key.bucket_id)
            query = query.where(api_keys.c.key_id.in_(_replaced(tenant_id)))
            conn.execute(query.values(**limits))
        detail = in_words(_stored(changes))
        _audit(conn, tenant_id, key_id, by, "key.change", now_ms, detail)
    return get_key(conn, tenant_id, key_id)


def rotate_key(
    conn: Connection,
    tenant_id: str,
    key_id: str,
    pepper: str,
    *,
    overlap_s: int,
    is_compromised: bool = False,
    now_ms: int,
    by: Identity | None = None,
) -> tuple[ApiKey, str]:
    """Make a key that replaces an old one, which expires after `overlap_s` seconds.

    Name, scopes, limits and what is used of them, maker and expiry are those of the old key; the
    keys that the old one made belong to the new one. is_compromised: the old key and all that came
    of it are revoked instead, with no overlap. Raises the errors of change_key, and QuotaExceeded.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise Invalid(f"overlap_s is from 0 to {MAX_OVERLAP_S}.", param="overlap_s")
    if is_compromised and overlap_s:
        raise Invalid("A compromised key has no overlap: overlap_s must be 0.", param="overlap_s")
    lock_tenant(conn, tenant_id)
    asker = _asker(conn, tenant_id, by, now_ms)
    old = _live_key(conn, tenant_id, key_id, asker, now_ms)
    kept = ("bucket_id", "name", "scopes", "created_by", "expires_at_ms", *LIMITS)
    values = {field: getattr(old, field) for field in kept} | {"replaces": key_id}
    detail = f"overlap {overlap_s} s"
    # The old key's end comes first, so that a tenant with MAX_KEYS keys may rotate.
    if is_compromised:
        is_meant = _family(conn, old, asker, now_ms)
        ended = _revoke(conn, tenant_id, is_meant, by, now_ms, f"rotation of {key_id}")
        detail = f"compromised, {len(ended)} keys revoked"
    else:
        end_ms = now_ms + overlap_s * 1000
        if old.expires_at_ms is not None:
            end_ms = min(end_ms, old.expires_at_ms)
        is_old = api_keys.c.key_id == key_id
        conn.execute(sa.update(api_keys).where(is_old).values(expires_at_ms=end_ms))
    new, plaintext = _insert(conn, tenant_id, pepper, values, now_ms)
    is_its = api_keys.c.created_by == key_id
    conn.execute(sa.update(api_keys).where(is_its).values(created_by=new.key_id))
    _audit(conn, tenant_id, key_id, by, "key.rotate", now_ms, f"{new.key_id}, {detail}")
    return new, plaintext


def revoke_key(
    conn: Connection,
    tenant_id: str,
    key_id: str,
    *,
    cascade: bool = False,
    now_ms: int,
    by: Identity | None = None,
) -> list[str]:
    """Refuse a key from now on; a second call does nothing. Returns the ids of the keys it ended.

    cascade: refuse its other rotations, the keys that they made, and so on, as well; without it
    those stay valid, but make no keys any more. Raises NotFound, also for another tenant's key;
    Forbidden.
    """
    lock_tenant(conn, tenant_id)
    key = get_key(conn, tenant_id, key_id)
    asker = _asker(conn, tenant_id, by, now_ms)
    _check_manages(conn, asker, key)
    is_meant = api_keys.c.key_id == key_id
    if cascade:
        is_meant = _family(conn, key, asker, now_ms)
    return _revoke(conn, tenant_id, is_meant, by, now_ms, f"cascade from {key_id}" * cascade)


def revoke_all(conn: Connection, tenant_id: str, *, now_ms: int) -> list[str]:
    """Refuse all keys of a tenant from now on. Returns the ids of the keys that this ended."""
    lock_tenant(conn, tenant_id)
    return _revoke(conn, tenant_id, is_live(now_ms), None, now_ms, "all of the tenant")


# ---- what may be said of a key ----


def _check(values: Mapping[str, Any]) -> None:
    """Check the values of a key's fields. Raises Invalid."""
    name, scopes = values.get("name", ""), values.get("scopes", SCOPES)
    if len(name) > MAX_NAME or not (name.isprintable()):
        raise Invalid(f"A key's name has at most {MAX_NAME} printable characters.", param="name")
    if not scopes or not scopes <= SCOPES:
        raise Invalid(f"A key has one or more of the scopes {sorted(SCOPES)}.", param="scopes")
    for limit in LIMITS:
        amount = values.get(limit)
        if amount is not None and not 0 < amount < 1 << 31:
            raise Invalid(f"{limit} is from 1 to {(1 << 31) - 1}, or null for none.", param=limit)


def _asker(conn: Connection, tenant_id: str, by: Identity | None, now_ms: int) -> ApiKey | None:
    """The asking key as it is now, which may have changed since it was authenticated.

    None is the operator. Raises Forbidden if the key may not manage keys.
    """
    if by is None:
        return None
    asker = get_key(conn, tenant_id, by.key_id)
    if not asker.is_live(now_ms) or ADMIN not in _scopes_now(conn, asker):
        raise Forbidden("This API key may not manage keys any more.")
    return asker


def _check_gives(conn: Connection, maker: ApiKey, values: Mapping[str, Any]) -> None:
    """Check that the key `maker` has now all that it gives. Raises Forbidden."""
    if beyond := values.get("scopes", frozenset()) - _scopes_now(conn, maker):
        raise Forbidden(f"This API key has not got the scopes {sorted(beyond)}.", param="scopes")
    for field in (*LIMITS, "expires_at_ms"):
        own = getattr(maker, field)
        if own is None or field not in values:
            continue
        if values[field] is None or values[field] > own:
            shown = field.removesuffix("_ms")
            raise Forbidden(f"{shown} may not be above this API key's own.", param=shown)


def _check_manages(conn: Connection, asker: ApiKey | None, key: ApiKey) -> None:
    """Check that the asking key is the key, or is above it. Raises Forbidden."""
    if asker is None or asker.key_id == key.key_id:
        return
    if asker.key_id not in {maker.key_id for maker in makers_of(conn, key.created_by)}:
        raise Forbidden(f"The API key {key.key_id!r} was not made by this one; ask who made it.")


def _live_key(
    conn: Connection, tenant_id: str, key_id: str, asker: ApiKey | None, now_ms: int
) -> ApiKey:
    """A live key that the asking key may change. Raises NotFound, Forbidden, Conflict."""
    key = get_key(conn, tenant_id, key_id)
    _check_manages(conn, asker, key)
    if not key.is_live(now_ms):
        message = f"The API key {key_id!r} is revoked or expired; make a new one."
        raise Conflict(message, code="key_ended", param="key_id")
    return key


def _scopes_now(conn: Connection, key: ApiKey) -> frozenset[str]:
    return bounded_scopes(key.scopes, makers_of(conn, key.created_by))


# ---- rows ----


def is_live(now_ms: int) -> sa.ColumnElement[bool]:
    """Whether a row of api_keys is neither revoked nor expired."""
    ends = api_keys.c.expires_at_ms
    return api_keys.c.revoked_at_ms.is_(None) & (ends.is_(None) | (ends > now_ms))


def _replaced(tenant_id: str) -> sa.Select[tuple[str | None]]:
    """Ids of the keys that a tenant's other keys were rotated from."""
    replaces = api_keys.c.replaces
    return sa.select(replaces).where(api_keys.c.tenant_id == tenant_id, replaces.is_not(None))


def _newest(conn: Connection, key: ApiKey, now_ms: int) -> str:
    """Id of the key that a live key was rotated to last, itself if it was not."""
    columns = api_keys.c
    query = sa.select(columns.key_id).where(columns.tenant_id == key.tenant_id, is_live(now_ms))
    query = query.where(
        columns.bucket_id == key.bucket_id, columns.key_id.not_in(_replaced(key.tenant_id))
    )
    query = query.order_by(columns.created_at_ms.desc(), columns.key_id)
    return conn.scalar(query.limit(1)) or key.key_id


def _family(
    conn: Connection, key: ApiKey, asker: ApiKey | None, now_ms: int
) -> sa.ColumnElement[bool]:
    """The key and the live keys that came of it, for the asking key to end. Raises Forbidden."""
    if asker == key and _newest(conn, key, now_ms) != key.key_id:
        # Whoever has only the old secret must not end the new key.
        raise Forbidden("This API key was replaced; ask with the key that replaced it.")
    among = (api_keys.c.tenant_id == key.tenant_id) & is_live(now_ms)
    is_it = api_keys.c.key_id == key.key_id
    return is_it | api_keys.c.key_id.in_(came_of(key.bucket_id, among))


def _revoke(
    conn: Connection,
    tenant_id: str,
    is_meant: sa.ColumnElement[bool],
    by: Identity | None,
    now_ms: int,
    detail: str,
) -> list[str]:
    """Revoke the keys that are meant and not revoked yet, and return their ids."""
    columns = api_keys.c
    query = sa.select(columns.key_id).where(columns.tenant_id == tenant_id, is_meant)
    query = query.where(columns.revoked_at_ms.is_(None)).order_by(columns.key_id)
    ended = list(conn.scalars(query))
    conn.execute(sa.update(api_keys).where(columns.key_id.in_(ended)).values(revoked_at_ms=now_ms))
    for key_id in ended:
        _audit(conn, tenant_id, key_id, by, "key.revoke", now_ms, detail)
    return ended


def _check_room(conn: Connection, tenant_id: str, replaces: str | None, now_ms: int) -> None:
    """Check that the tenant may have another key, which replaces one or none. Raises QuotaExceeded.

    A replaced key does not count as a key of the tenant any more, so that it can always be rotated.
    """
    columns = api_keys.c
    is_replaced = columns.key_id.in_(_replaced(tenant_id)) | (columns.key_id == (replaces or ""))
    query = sa.select(is_replaced, sa.func.count()).group_by(is_replaced)
    query = query.where(columns.tenant_id == tenant_id, is_live(now_ms))
    counts = {bool(row[0]): row[1] for row in conn.execute(query)}
    if counts.get(False, 0) >= MAX_KEYS or counts.get(True, 0) > MAX_KEYS:
        raise QuotaExceeded(
            f"An account has at most {MAX_KEYS} keys, and as many in the overlap of a rotation; "
            "revoke one first.",
            code="max_keys",
        )


def _insert(
    conn: Connection, tenant_id: str, pepper: str, values: Mapping[str, Any], now_ms: int
) -> tuple[ApiKey, str]:
    """Make and store a key. Raises Forbidden for a chain of too many keys, QuotaExceeded."""
    if len(makers_of(conn, values.get("created_by"))) >= MAX_CHAIN:
        raise Forbidden(
            f"A key may be made by a key that another made, but not past {MAX_CHAIN} keys."
        )
    _check_room(conn, tenant_id, values.get("replaces"), now_ms)
    key_id, plaintext = auth.make_key()
    key = ApiKey(
        key_id=key_id,
        tenant_id=tenant_id,
        prefix=f"sk-chorale-{key_id}",
        created_at_ms=now_ms,
        **{"bucket_id": key_id, **values},
    )
    row = _stored(asdict(key)) | {"hmac": auth.digest(pepper, plaintext)}
    conn.execute(sa.insert(api_keys).values(**row))
    return key, plaintext


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    if "scopes" not in values:
        return dict(values)
    return {**values, "scopes": json.dumps(sorted(values["scopes"]))}


def _audit(
    conn: Connection,
    tenant_id: str,
    key_id: str,
    by: Identity | None,
    action: str,
    now_ms: int,
    detail: str,
) -> None:
    actor = "operator" if by is None else by.actor
    record_audit(conn, tenant_id, action, detail, target=key_id, at_ms=now_ms, actor=actor)
