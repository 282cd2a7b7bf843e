import dataclasses

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry.errors import Conflict, Forbidden, Invalid, NotFound, QuotaExceeded
from registry.tables import audit_log
from server.accounts import keys
from server.accounts.auth import (
    ADAPTERS_READ,
    ADMIN,
    INFERENCE,
    SCOPES,
    USAGE_READ,
    InvalidApiKey,
)
from server.accounts.keys import (
    DEFAULT_SCOPES,
    get_key,
    list_keys,
    revoke_all,
)
from server.accounts.lineage import MAX_CHAIN
from server.accounts.tables import api_keys
from server.limits.amounts import LIMITS
from tests.refusals import refused
from tests.server.factories import NOW_MS
from tests.server.key_world import World, id_of

DAY_MS = 86_400_000


@pytest.fixture
def world(each_database):
    return World(each_database)


@pytest.fixture
def alone(sqlite_database):
    """A world on SQLite alone, for tests that do not depend on the database."""
    return World(sqlite_database)


def test_a_key_gives_no_scope_that_it_lacks(alone):
    admin = alone.make(scopes={ADMIN, INFERENCE})
    child = alone.make(by=admin, scopes=frozenset({INFERENCE}))
    assert alone.identity(child).scopes == {INFERENCE}
    for change in (
        lambda: alone.make(by=admin, scopes=frozenset({INFERENCE, USAGE_READ})),
        lambda: alone.change(child, by=admin, scopes=frozenset({USAGE_READ})),
        lambda: alone.change(admin, by=admin, scopes=SCOPES),
    ):
        with pytest.raises(Forbidden) as refused:
            change()
        assert refused.value.param == "scopes"


def test_without_a_word_a_key_gets_what_its_maker_may_give_but_never_admin(alone):
    assert alone.identity(alone.make()).scopes == DEFAULT_SCOPES
    admin = alone.make(scopes={ADMIN, INFERENCE}, tokens_per_minute=9, expires_at_ms=NOW_MS + 5)
    child = alone.key(alone.make(by=admin))
    assert (child.scopes, child.tokens_per_minute, child.expires_at_ms) == (
        {INFERENCE},
        9,
        NOW_MS + 5,
    )
    assert child.created_by == id_of(admin)


def test_narrowing_a_key_narrows_at_once_what_it_made_and_what_that_made(world):
    admin = world.make(scopes=SCOPES)
    child = world.make(by=admin, scopes={ADMIN, INFERENCE, USAGE_READ})
    grandchild = world.make(by=child, scopes={INFERENCE, USAGE_READ})
    world.change(admin, scopes=frozenset({ADMIN, USAGE_READ}))
    assert world.identity(child).scopes == {ADMIN, USAGE_READ}
    assert world.identity(grandchild).scopes == {USAGE_READ}
    assert world.key(grandchild).scopes == {INFERENCE, USAGE_READ}
    with pytest.raises(Forbidden):
        world.make(by=child, scopes={INFERENCE})


def test_a_maker_that_has_ended_still_binds_and_can_be_narrowed_no_more(alone):
    admin = alone.make(scopes={ADMIN, INFERENCE})
    child = alone.make(by=admin, scopes={INFERENCE})
    alone.revoke(admin)
    assert alone.identity(child).scopes == {INFERENCE}
    alone.change(child, scopes=SCOPES)
    assert alone.identity(child).scopes == {ADMIN, INFERENCE}
    with pytest.raises(Conflict):
        alone.change(admin, scopes=frozenset({INFERENCE}))


def test_what_a_key_may_give_is_asked_when_it_gives_not_when_it_logged_in(alone):
    admin = alone.make(scopes=SCOPES)
    before = alone.identity(admin)
    alone.change(admin, scopes=frozenset({ADMIN}))
    with pytest.raises(Forbidden):
        alone.make(by=before, scopes=frozenset({INFERENCE}))
    alone.revoke(admin)
    with pytest.raises(Forbidden):
        alone.make(by=before, scopes=frozenset({ADMIN}))


@pytest.mark.parametrize("limit", LIMITS)
def test_no_key_is_raised_above_the_one_that_asks(alone, limit):
    admin = alone.make(scopes=SCOPES, **{limit: 10})
    child = alone.make(by=admin, **{limit: 3})
    for value in (11, None):
        for target in (child, admin):
            with pytest.raises(Forbidden) as refused:
                alone.change(target, by=admin, **{limit: value})
            assert refused.value.param == limit
    with pytest.raises(Forbidden):
        alone.make(by=admin, **{limit: 11})
    assert getattr(alone.change(child, by=admin, **{limit: 10}), limit) == 10
    amounts = {(found.scope, found.metric): found.amount for found in alone.identity(child).limits}
    assert amounts == {("key", LIMITS[limit]): 10}


def test_no_key_outlives_by_its_own_word_the_one_that_asks(alone):
    admin = alone.make(scopes=SCOPES, expires_at_ms=NOW_MS + DAY_MS)
    for expires_at_ms in (NOW_MS + DAY_MS + 1, None):
        with pytest.raises(Forbidden):
            alone.change(admin, by=admin, expires_at_ms=expires_at_ms)


def test_a_key_manages_itself_and_what_came_of_it_and_nothing_else(alone):
    ours, theirs = alone.make(scopes=SCOPES), alone.make(scopes=SCOPES)
    child = alone.make(by=ours, scopes=SCOPES)
    grandchild = alone.make(by=child)
    for foreign in (theirs, alone.make(by=theirs)):
        for manage in (alone.revoke, alone.rotate, alone.change):
            with pytest.raises(Forbidden):
                manage(foreign, by=ours)
    with pytest.raises(Forbidden):
        alone.revoke(ours, by=child)
    alone.revoke(grandchild, by=ours)
    alone.rotate(child, by=ours)
    alone.revoke(ours, by=ours)
    assert [alone.is_good(key) for key in (ours, child, grandchild)] == [False, True, False]


def test_a_revocation_that_cascades_ends_all_that_came_of_the_key_and_nothing_else(world):
    root = world.make(scopes=SCOPES)
    child = world.make(by=root, scopes=SCOPES)
    sibling = world.make(by=root)
    grandchild = world.make(by=child)
    rotated = world.rotate(child)
    others = [world.make(by=rotated), world.rotate(grandchild), grandchild, child, rotated]
    ended = world.revoke(rotated, by=root, cascade=True)
    assert sorted(ended) == sorted(map(id_of, others))
    assert world.good(root, sibling, *others) == [root, sibling]
    assert world.revoke(rotated, by=root, cascade=True) == []
    rows = world.database.read_sync(lambda c: c.execute(sa.select(audit_log)).all())
    told = [(row.target, row.actor, row.detail) for row in rows if row.action == "key.revoke"]
    detail = f"cascade from {id_of(rotated)}"
    assert told == [(key_id, f"key:{id_of(root)}", detail) for key_id in ended]


def test_a_compromised_key_is_replaced_and_all_that_it_made_ends_at_once(world):
    root = world.make(scopes=SCOPES, requests_per_minute=7)
    keys = [root, world.make(by=root, scopes=SCOPES), world.rotate(root)]
    new = world.rotate(keys[-1], overlap_s=0, is_compromised=True)
    assert world.good(*keys, new) == [new]
    assert world.key(new).requests_per_minute == 7
    assert world.key(new).bucket_id == id_of(root)
    with pytest.raises(Invalid):
        world.rotate(new, overlap_s=1, is_compromised=True)


def test_a_replaced_key_does_not_end_the_key_that_replaced_it(alone):
    old = alone.make(scopes=SCOPES)
    new = alone.rotate(old)
    for end in (
        lambda: alone.revoke(old, by=old, cascade=True),
        lambda: alone.rotate(old, by=old, overlap_s=0, is_compromised=True),
    ):
        with pytest.raises(Forbidden):
            end()
    assert alone.good(old, new) == [old, new]


def test_a_key_below_a_revoked_one_goes_on_but_makes_no_keys(alone):
    root = alone.make(scopes=SCOPES)
    child = alone.make(by=root, scopes=SCOPES)
    grandchild = alone.make(by=child, scopes=SCOPES)
    alone.revoke(root)
    for key in (child, grandchild):
        with pytest.raises(Forbidden):
            alone.make(by=key)
    assert alone.good(child, grandchild) == [child, grandchild]


def test_a_revoked_key_that_another_gateway_still_remembers_manages_nothing(alone):
    root = alone.make(scopes=SCOPES)
    child = alone.make(by=root, scopes=SCOPES)
    remembered = alone.identity(root)
    alone.revoke(root)
    for manage in (alone.rotate, alone.change, alone.revoke):
        with pytest.raises(Forbidden):
            manage(child, by=remembered)


def test_all_keys_of_a_tenant_end_together_and_those_of_others_go_on(sqlite_database):
    ours, theirs = World(sqlite_database), World(sqlite_database, "globex")
    root = ours.make(scopes=SCOPES)
    keys = [root, ours.make(by=root), ours.make()]
    other = theirs.make()
    ended = sqlite_database.write_sync(lambda c: revoke_all(c, ours.tenant_id, now_ms=ours.now_ms))
    assert ended == sorted(map(id_of, keys))
    assert ours.good(*keys, other) == [other]


def test_another_tenants_key_is_not_there(sqlite_database):
    ours, theirs = World(sqlite_database), World(sqlite_database, "globex")
    admin, key = ours.make(scopes=SCOPES), theirs.make()
    for manage in (ours.revoke, ours.rotate, ours.change, ours.key):
        with refused("key_not_found"):
            manage(key, **({} if manage == ours.key else {"by": admin}))
    assert theirs.is_good(key)


def test_rotation_gives_a_key_that_is_the_same_and_ends_the_old_one_after_the_overlap(alone):
    admin = alone.make(scopes=SCOPES)
    old = alone.make(by=admin, scopes={INFERENCE}, max_concurrency=2)
    new = alone.rotate(old, overlap_s=60)
    before, after = alone.key(old), alone.key(new)
    others = {"key_id", "prefix", "replaces", "expires_at_ms"}
    same = {field.name for field in dataclasses.fields(after)} - others
    assert all(getattr(before, name) == getattr(after, name) for name in same)
    assert (after.replaces, after.expires_at_ms) == (id_of(old), None)
    alone.now_ms += 59_999
    assert alone.is_good(old)
    alone.now_ms += 1
    assert not alone.is_good(old)
    assert alone.is_good(new)


def test_without_an_overlap_the_old_key_ends_at_once_and_a_second_rotation_is_refused(alone):
    key = alone.make()
    alone.rotate(key, overlap_s=0)
    assert not alone.is_good(key)
    with pytest.raises(Conflict):
        alone.rotate(key)
    with pytest.raises(Invalid):
        alone.rotate(alone.make(), overlap_s=keys.MAX_OVERLAP_S + 1)


def test_rotation_never_makes_a_key_last_longer(alone):
    key = alone.make(expires_at_ms=NOW_MS + 1000)
    new = alone.rotate(key, overlap_s=60)
    assert alone.key(key).expires_at_ms == alone.key(new).expires_at_ms == NOW_MS + 1000


def test_what_a_key_made_belongs_to_the_key_that_replaced_it(alone):
    admin = alone.make(scopes=SCOPES)
    child = alone.make(by=admin)
    new = alone.rotate(admin)
    assert alone.key(child).created_by == id_of(new)
    alone.revoke(child, by=new)
    assert not alone.is_good(child)


def test_a_chain_of_makers_has_an_end(alone):
    key = alone.make(scopes=SCOPES)
    for _ in range(MAX_CHAIN - 1):
        key = alone.make(by=key, scopes=SCOPES)
    assert alone.identity(key).scopes == SCOPES
    with pytest.raises(Forbidden):
        alone.make(by=key, scopes=SCOPES)


def test_a_chain_longer_than_any_that_is_made_allows_nothing(alone):
    chain = [alone.make(scopes=SCOPES) for _ in range(MAX_CHAIN + 1)]
    for maker, key in zip(chain, chain[1:], strict=False):
        values = sa.update(api_keys).where(api_keys.c.key_id == id_of(key))
        alone.database.write_sync(
            lambda c, v=values, m=maker: c.execute(v.values(created_by=id_of(m)))
        )
    assert alone.identity(chain[-2]).scopes == SCOPES
    assert alone.identity(chain[-1]).scopes == frozenset()


def test_a_tenant_has_so_many_keys_at_a_time_and_may_still_rotate(alone, monkeypatch):
    monkeypatch.setattr(keys, "MAX_KEYS", 2)
    first, _ = alone.make(), alone.make(expires_at_ms=NOW_MS + 1000)
    with refused("max_keys"):
        alone.make()
    third = alone.rotate(alone.rotate(first))
    with pytest.raises(QuotaExceeded):
        alone.rotate(third)
    alone.rotate(third, overlap_s=0)
    alone.now_ms += 1000
    alone.make()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("name", "x" * 101),
        ("name", "a\0b"),
        ("name", "two\nlines"),
        ("scopes", frozenset()),
        ("scopes", frozenset({"operator"})),
        ("requests_per_minute", 0),
        ("tokens_per_minute", 1 << 31),
    ],
)
def test_what_no_key_can_be_is_refused(alone, param, value):
    key = alone.make()
    with pytest.raises(Invalid) as refused:
        alone.change(key, **{param: value})
    assert refused.value.param == param


def test_an_id_that_no_database_takes_is_no_key(world):
    for key_id in ("", "\0", "a\0b", "ä", "x" * 99, "%"):
        with pytest.raises(NotFound):
            world.database.read_sync(lambda c, k=key_id: get_key(c, world.tenant_id, k))


def test_pages_hold_every_key_once_the_oldest_first(world):
    made = []
    for _ in range(7):
        made.append(id_of(world.make()))
        world.now_ms += 1 if len(made) % 3 else 0
    seen, after = [], None
    while page := world.database.read_sync(
        lambda c, a=after: list_keys(c, world.tenant_id, after=a, limit=2)
    ):
        seen += [key.key_id for key in page]
        after = seen[-1]
    assert sorted(seen) == sorted(made)
    times = [world.database.read_sync(lambda c, k=k: get_key(c, world.tenant_id, k)) for k in seen]
    assert [key.created_at_ms for key in times] == sorted(key.created_at_ms for key in times)


def test_every_act_names_the_key_that_did_it_and_shows_no_secret(alone):
    admin = alone.make(scopes=SCOPES)
    child = alone.make(by=admin)
    alone.change(child, by=admin, name="other", max_concurrency=3)
    new = alone.rotate(child, by=admin)
    alone.revoke(new, by=admin)
    rows = alone.database.read_sync(lambda c: c.execute(sa.select(audit_log)).all())[2:]
    actor, tenant_id = f"key:{id_of(admin)}", alone.tenant_id
    assert [(row.action, row.target) for row in rows] == [
        ("key.create", id_of(child)),
        ("key.change", id_of(child)),
        ("key.rotate", id_of(child)),
        ("key.revoke", id_of(new)),
    ]
    assert {(row.actor, row.tenant_id) for row in rows} == {(actor, tenant_id)}
    assert not any(key.split("-")[3] in repr(rows) for key in (admin, child, new))


_scopes = st.frozensets(st.sampled_from(sorted(SCOPES)), min_size=1)
_acts = st.lists(
    st.tuples(
        st.sampled_from(["make", "change", "rotate", "revoke"]),
        st.integers(0, 20),
        st.integers(0, 20),
        _scopes,
        st.sampled_from([None, 1, 5]),
    ),
    max_size=25,
)


@given(acts=_acts)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_nothing_that_keys_do_gives_any_of_them_more_than_the_first_has(sqlite_database, acts):
    """The operator makes only the first key; all others come from keys made before."""
    world = World(sqlite_database, f"t{next(_numbers)}")
    has = frozenset({ADMIN, INFERENCE, ADAPTERS_READ})
    made = [world.make(scopes=has, max_concurrency=3)]
    for act, asker, target, scopes, amount in acts:
        by, key = made[asker % len(made)], made[target % len(made)]
        try:
            match act:
                case "make":
                    made.append(world.make(by=by, scopes=scopes, max_concurrency=amount))
                case "change":
                    world.change(key, by=by, scopes=scopes, max_concurrency=amount)
                case "rotate":
                    made.append(world.rotate(key, by=by))
                case "revoke":
                    world.revoke(key, by=by)
        except (Forbidden, Conflict, InvalidApiKey):
            continue
        for plaintext in filter(world.is_good, made):
            assert world.identity(plaintext).scopes <= has
            found = {limit.metric: limit.amount for limit in world.identity(plaintext).limits}
            assert found["concurrency"] <= 3


_numbers = iter(range(10_000))
