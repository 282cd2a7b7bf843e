"""Management of API keys: they are made, listed, changed, rotated and revoked.

A key with the scope admin gives no more than it has: scopes, limits and time. It manages itself,
the keys that it made, and the keys that those made; the operator manages all.

AuthError
├── KeyNotFound     the tenant has no such key
├── InvalidKey      a field of a key has a value that it cannot have
├── BeyondRights    the asking key lacks what it would give, or did not make the key to be changed
├── KeyEnded        the key is revoked or expired, and stays so
└── TooManyKeys     the tenant has as many keys as it may have
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from registry.adapter_rows import lock_tenant
from registry.audit import record_audit
from server.accounts import auth
from server.accounts.auth import ADMIN, LIMITS, MAX_CHAIN, SCOPES, AuthError, Identity
from server.accounts.tables import api_keys

# The scope `admin` makes its holder the tenant's admin, so a key gets it only when asked for.
DEFAULT_SCOPES = SCOPES - {ADMIN}

MAX_KEYS = 1000
"""Most keys that a tenant has at a time, without those that are revoked or expired."""
MAX_NAME = 100
MAX_OVERLAP_S = 7 * 86_400
MAX_PAGE = 1000


class KeyNotFound(AuthError):
    def __init__(self, key_id: str) -> None:
        self.key_id = key_id
        super().__init__(f"There is no API key {key_id!r}.")


class InvalidKey(AuthError):
    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(message)


class BeyondRights(AuthError):
    def __init__(self, param: str | None, message: str) -> None:
        self.param = param
        super().__init__(message)


class KeyEnded(AuthError):
    def __init__(self, key_id: str) -> None:
        self.key_id = key_id
        super().__init__(f"The API key {key_id!r} is revoked or expired; make a new one.")


class TooManyKeys(AuthError):
    def __init__(self) -> None:
        super().__init__(f"An account has at most {MAX_KEYS} keys; revoke one first.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """All facts about a key that may be listed, so not the key itself.

    created_by: id of the key that made it; None for the operator.   replaces: id of the key that it
    was rotated from.   Limits: None where it has none of its own; the tenant's hold as well.
    """

    key_id: str
    tenant_id: str
    name: str
    prefix: str
    scopes: frozenset[str]
    created_at_ms: int
    created_by: str | None = None
    replaces: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None
    last_used_at_ms: int | None = None

    def is_live(self, now_ms: int) -> bool:
        is_expired = self.expires_at_ms is not None and self.expires_at_ms <= now_ms
        return self.revoked_at_ms is None and not is_expired


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
    Raises InvalidKey, BeyondRights, TooManyKeys.
    """
    maker = None if by is None else get_key(conn, tenant_id, by.key_id)
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
        _check_maker(conn, maker, values, now_ms)
    values["created_by"] = maker and maker.key_id
    key, plaintext = _insert(conn, tenant_id, pepper, values, now_ms)
    _audit(conn, key, by, "key.create", now_ms, f"{name!r}: {' '.join(sorted(key.scopes))}")
    return key, plaintext


def get_key(conn: Connection, tenant_id: str, key_id: str) -> ApiKey:
    """A tenant's key by its id. Raises KeyNotFound, also for another tenant's key."""
    # The form is checked here, since PostgreSQL refuses some texts that cannot be an id.
    if not (key_id.isascii() and key_id.isalnum()):
        raise KeyNotFound(key_id)
    is_it = (api_keys.c.tenant_id == tenant_id) & (api_keys.c.key_id == key_id)
    row = conn.execute(sa.select(api_keys).where(is_it)).first()
    if row is None:
        raise KeyNotFound(key_id)
    return _api_key(row._mapping)


def list_keys(
    conn: Connection, tenant_id: str, *, after: str | None = None, limit: int = MAX_PAGE
) -> list[ApiKey]:
    """A tenant's keys after `after`, ended ones too, the oldest first. Raises KeyNotFound."""
    query = sa.select(api_keys).where(api_keys.c.tenant_id == tenant_id)
    if after is not None:
        last = get_key(conn, tenant_id, after)
        place = sa.tuple_(api_keys.c.created_at_ms, api_keys.c.key_id)
        query = query.where(place > sa.tuple_(sa.literal(last.created_at_ms), last.key_id))
    rows = conn.execute(query.order_by(api_keys.c.created_at_ms, api_keys.c.key_id).limit(limit))
    return [_api_key(row._mapping) for row in rows]


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
    that the key made. Raises KeyNotFound, KeyEnded, InvalidKey, BeyondRights.
    """
    key = _live_key(conn, tenant_id, key_id, by, now_ms)
    _check(changes)
    if by is not None:
        _check_maker(conn, get_key(conn, tenant_id, by.key_id), changes, now_ms)
    if changes:
        is_it = api_keys.c.key_id == key_id
        conn.execute(sa.update(api_keys).where(is_it).values(**_stored(changes)))
        said = (f"{field}={value}" for field, value in _stored(changes).items())
        _audit(conn, key, by, "key.change", now_ms, " ".join(said))
    return get_key(conn, tenant_id, key_id)


def rotate_key(
    conn: Connection,
    tenant_id: str,
    key_id: str,
    pepper: str,
    *,
    overlap_s: int,
    now_ms: int,
    by: Identity | None = None,
) -> tuple[ApiKey, str]:
    """Make a key that replaces an old one, which expires after `overlap_s` seconds.

    Name, scopes, limits, maker and expiry are those of the old key; the keys that the old one made
    belong to the new one. Raises the errors of change_key, and TooManyKeys.
    """
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise InvalidKey("overlap_s", f"overlap_s is from 0 to {MAX_OVERLAP_S}.")
    old = _live_key(conn, tenant_id, key_id, by, now_ms)
    kept = ("name", "scopes", "created_by", "expires_at_ms", *LIMITS)
    values = {field: getattr(old, field) for field in kept} | {"replaces": key_id}
    end_ms = now_ms + overlap_s * 1000
    if old.expires_at_ms is not None:
        end_ms = min(end_ms, old.expires_at_ms)
    is_old, is_its = api_keys.c.key_id == key_id, api_keys.c.created_by == key_id
    # The old key's end comes first, so that a tenant with MAX_KEYS keys may rotate without overlap.
    conn.execute(sa.update(api_keys).where(is_old).values(expires_at_ms=end_ms))
    new, plaintext = _insert(conn, tenant_id, pepper, values, now_ms)
    conn.execute(sa.update(api_keys).where(is_its).values(created_by=new.key_id))
    _audit(conn, old, by, "key.rotate", now_ms, f"{new.key_id}, overlap {overlap_s} s")
    return new, plaintext


def revoke_key(
    conn: Connection, tenant_id: str, key_id: str, *, now_ms: int, by: Identity | None = None
) -> None:
    """Refuse a key from now on, but not the keys that it made; a second call does nothing.

    Raises KeyNotFound, also for another tenant's key; BeyondRights.
    """
    key = get_key(conn, tenant_id, key_id)
    _check_manages(conn, by, key)
    if key.revoked_at_ms is None:
        is_it = api_keys.c.key_id == key_id
        conn.execute(sa.update(api_keys).where(is_it).values(revoked_at_ms=now_ms))
        _audit(conn, key, by, "key.revoke", now_ms)


# ---- what may be said of a key ----


def _check(values: Mapping[str, Any]) -> None:
    """Check the values of a key's fields. Raises InvalidKey."""
    name, scopes = values.get("name", ""), values.get("scopes", SCOPES)
    if len(name) > MAX_NAME or not (name.isprintable()):
        raise InvalidKey("name", f"A key's name has at most {MAX_NAME} printable characters.")
    if not scopes or not scopes <= SCOPES:
        raise InvalidKey("scopes", f"A key has one or more of the scopes {sorted(SCOPES)}.")
    for limit in LIMITS:
        amount = values.get(limit)
        if amount is not None and not 0 < amount < 1 << 31:
            raise InvalidKey(limit, f"{limit} is from 1 to {(1 << 31) - 1}, or null for none.")


def _check_maker(conn: Connection, maker: ApiKey, values: Mapping[str, Any], now_ms: int) -> None:
    """Check that the key `maker` has now all that it gives. Raises BeyondRights."""
    own_scopes = _scopes_now(conn, maker)
    if not maker.is_live(now_ms) or ADMIN not in own_scopes:
        raise BeyondRights(None, "This API key may not manage keys any more.")
    if beyond := values.get("scopes", frozenset()) - own_scopes:
        raise BeyondRights("scopes", f"This API key has not got the scopes {sorted(beyond)}.")
    for field in (*LIMITS, "expires_at_ms"):
        own = getattr(maker, field)
        if own is None or field not in values:
            continue
        if values[field] is None or values[field] > own:
            shown = field.removesuffix("_ms")
            raise BeyondRights(shown, f"{shown} may not be above this API key's own.")


def _check_manages(conn: Connection, by: Identity | None, key: ApiKey) -> None:
    """Check that `by` is the key, or is above it. Raises BeyondRights."""
    if by is None or by.key_id in (key.key_id, *auth.makers_of(conn, key.created_by)):
        return
    raise BeyondRights(
        None, f"The API key {key.key_id!r} was not made by this one; ask who made it."
    )


def _live_key(
    conn: Connection, tenant_id: str, key_id: str, by: Identity | None, now_ms: int
) -> ApiKey:
    """A live key that `by` may change. Raises KeyNotFound, BeyondRights, KeyEnded."""
    lock_tenant(conn, tenant_id)
    key = get_key(conn, tenant_id, key_id)
    _check_manages(conn, by, key)
    if not key.is_live(now_ms):
        raise KeyEnded(key_id)
    return key


def _scopes_now(conn: Connection, key: ApiKey) -> frozenset[str]:
    return auth.bounded_scopes(conn, key.scopes, key.created_by)


# ---- rows ----


def _insert(
    conn: Connection, tenant_id: str, pepper: str, values: Mapping[str, Any], now_ms: int
) -> tuple[ApiKey, str]:
    """Make and store a key. Raises BeyondRights for a chain of too many keys, TooManyKeys."""
    lock_tenant(conn, tenant_id)
    if len(auth.makers_of(conn, values["created_by"])) >= MAX_CHAIN:
        raise BeyondRights(
            None, f"A key may be made by a key that another made, but not past {MAX_CHAIN} keys."
        )
    columns = api_keys.c
    is_live = columns.revoked_at_ms.is_(None) & (
        columns.expires_at_ms.is_(None) | (columns.expires_at_ms > now_ms)
    )
    query = sa.select(sa.func.count()).where(columns.tenant_id == tenant_id, is_live)
    if (conn.scalar(query) or 0) >= MAX_KEYS:
        raise TooManyKeys
    key_id, plaintext = auth.make_key()
    key = ApiKey(
        key_id=key_id,
        tenant_id=tenant_id,
        prefix=f"sk-chorale-{key_id}",
        created_at_ms=now_ms,
        **values,
    )
    row = {field: getattr(key, field) for field in ApiKey.__slots__}
    row |= {"hmac": auth.digest(pepper, plaintext)}
    conn.execute(sa.insert(api_keys).values(**_stored(row)))
    return key, plaintext


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    if "scopes" not in values:
        return dict(values)
    return {**values, "scopes": json.dumps(sorted(values["scopes"]))}


def _api_key(row: RowMapping) -> ApiKey:
    values = {name: row[name] for name in ApiKey.__slots__ if name != "scopes"}
    return ApiKey(scopes=auth.parse_scopes(row["scopes"]), **values)


def _audit(
    conn: Connection, key: ApiKey, by: Identity | None, action: str, now_ms: int, detail: str = ""
) -> None:
    record_audit(
        conn,
        at_ms=now_ms,
        actor="operator" if by is None else by.actor,
        action=action,
        target=key.key_id,
        tenant_id=key.tenant_id,
        detail=detail,
    )
