"""Aliases: the version that they mean, canaries, rollbacks, and records of who moved them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from registry.catalog.alias_rows import Canary, Target, bucket_of
from registry.errors import QuotaExceeded
from registry.tables import adapter_events, alias_moves, audit_log
from tests.refusals import refused

A = "tenant-a"
percents = st.integers(1, 99)


@pytest.fixture
def three(make_version):
    """Versions 1 to 3 of pirate; latest is 3."""
    return [make_version(content=content) for content in "123"]


@pytest.mark.parametrize("version", [0, 2, -1, 10**12])
def test_an_alias_cannot_point_at_nothing(catalog, connection, make_version, version):
    make_version()
    with refused("model_not_found"):
        catalog.set_alias(connection, A, "pirate", "prod", version)


@pytest.mark.parametrize("alias", ["", "3", "1st", "Prod", "a" * 65, "a/b", "a\n"])
def test_an_alias_that_is_no_alias_is_refused(catalog, connection, make_version, alias):
    make_version()
    with refused("invalid_name"):
        catalog.set_alias(connection, A, "pirate", alias, 1)


# ---- canaries ----


@given(key=st.text(), lower=percents, higher=percents)
def test_a_higher_percent_takes_nobody_back_from_the_canary(key, lower, higher):
    lower, higher = sorted((lower, higher))
    bucket = bucket_of("ad_1", "prod", key)
    if Target(1, Canary(2, lower)).version_in(bucket) == 2:
        assert Target(1, Canary(2, higher)).version_in(bucket) == 2


@given(key=st.text(st.characters()))
def test_any_text_is_a_key_and_always_the_same_bucket(key):
    bucket = bucket_of("ad_1", "prod", key)
    assert 0 <= bucket < 10_000
    assert bucket_of("ad_1", "prod", key) == bucket


@pytest.mark.parametrize("percent", [1, 10, 50, 99])
def test_a_canary_gets_its_share_of_the_keys(percent):
    target, num_keys = Target(1, Canary(2, percent)), 10_000
    chosen = sum(
        target.version_in(bucket_of("ad_1", "prod", f"k{i}")) == 2 for i in range(num_keys)
    )
    share = percent / 100
    # The bound is five standard deviations of a fair draw.
    assert abs(chosen - share * num_keys) < 5 * math.sqrt(share * (1 - share) * num_keys)


def test_the_same_key_falls_elsewhere_under_another_alias_or_adapter():
    keys = [f"k{i}" for i in range(100)]
    places = [("ad_1", "prod"), ("ad_1", "next"), ("ad_2", "prod")]
    assert len({tuple(bucket_of(*place, key) for key in keys) for place in places}) == 3


def test_a_request_key_decides_between_a_version_and_its_canary(catalog, connection, three):
    catalog.set_alias(connection, A, "pirate", "prod", 1, Canary(2, 50))
    adapter_id = three[0].adapter_id
    for key in ("", "anna", "berta", "carla", "dora", "\ud800"):
        meant = catalog.resolve(connection, A, "pirate@prod", key)
        expected = 2 if bucket_of(adapter_id, "prod", key) < 5000 else 1
        assert meant == three[expected - 1]


@pytest.mark.parametrize("canary", [Canary(1, 10), Canary(2, 0), Canary(2, 100), Canary(2, -1)])
def test_what_is_no_canary_is_refused(catalog, connection, three, canary):
    with refused("invalid_canary"):
        catalog.set_alias(connection, A, "pirate", "prod", 1, canary)


# ---- rollbacks and the list of moves ----


def test_a_rollback_to_a_deleted_version_is_refused_by_its_number(catalog, connection, three):
    catalog.set_alias(connection, A, "pirate", "prod", 1, Canary(2, 10))
    catalog.set_alias(connection, A, "pirate", "prod", 3)
    catalog.delete_version(connection, A, "pirate", 2)
    with refused("version_deleted", match="Version 2 "):
        catalog.roll_back_alias(connection, A, "pirate", "prod")
    catalog.restore_version(connection, A, "pirate", 2)
    catalog.roll_back_alias(connection, A, "pirate", "prod")


def test_to_set_what_is_set_already_is_no_move(catalog, connection, three):
    """A request that is repeated because its answer was lost must not change the rollback."""
    for _ in range(2):
        catalog.set_alias(connection, A, "pirate", "latest", 1)
    catalog.roll_back_alias(connection, A, "pirate", "latest")
    assert catalog.resolve(connection, A, "pirate").version == 3


def test_moves_are_listed_newest_first_in_pages(catalog, connection, three):
    catalog.set_alias(connection, A, "pirate", "prod", 1, actor="key:k1")
    catalog.set_alias(connection, A, "pirate", "prod", 2, Canary(3, 5), actor="key:k2")
    catalog.remove_alias(connection, A, "pirate", "prod", actor="key:k3")
    moves = catalog.list_moves(connection, A, "pirate", "prod")
    assert [move.target for move in moves] == [None, Target(2, Canary(3, 5)), Target(1)]
    assert [move.moved_by for move in moves] == ["key:k3", "key:k2", "key:k1"]
    rest = catalog.list_moves(connection, A, "pirate", "prod", before=moves[0].move_id, limit=1)
    assert rest == moves[1:2]
    with refused("model_not_found"):
        catalog.list_moves(connection, A, "pirate", "next")


def test_an_adapter_has_only_so_many_aliases(catalog, connection, make_version, monkeypatch):
    monkeypatch.setattr("registry.catalog.catalog.MAX_ALIASES", 5)
    make_version()
    for number in range(4):
        catalog.set_alias(connection, A, "pirate", f"a{number}", 1)
    with pytest.raises(QuotaExceeded):
        catalog.set_alias(connection, A, "pirate", "one-more", 1)
    catalog.remove_alias(connection, A, "pirate", "a0")
    catalog.set_alias(connection, A, "pirate", "one-more", 1)


# ---- the audit log and events ----


def test_a_move_is_told_to_the_audit_log_and_to_gateways_in_its_transaction(
    catalog, database, three
):
    def told(conn):
        audit = conn.execute(select(audit_log).order_by(audit_log.c.audit_id)).all()
        events = conn.execute(select(adapter_events).order_by(adapter_events.c.event_id)).all()
        moves = conn.execute(select(alias_moves).order_by(alias_moves.c.move_id)).all()
        return audit, events, moves

    with database.begin() as conn:
        before = [len(rows) for rows in told(conn)]
        assert before == [3, 3, 3]  # each version moved latest
        catalog.set_alias(conn, A, "pirate", "prod", 1, Canary(2, 10), actor="key:k1")
        audit, events, moves = (rows[3:] for rows in told(conn))
        assert [(row.actor, row.action, row.target, row.detail) for row in audit] == [
            ("key:k1", "alias.move", "tenant-a/pirate@prod", "new -> 1, 10 % to 2")
        ]
        told_to_gateways = [(row.kind, row.tenant_id, row.version) for row in events]
        assert told_to_gateways == [("moved", A, 1), ("moved", A, 2)]
        assert len(moves) == 1
        conn.rollback()
    with database.connect() as conn:
        assert [len(rows) for rows in told(conn)] == before
        assert "prod" not in catalog.get_adapter(conn, A, "pirate").aliases


def test_who_uploaded_a_version_has_moved_latest(catalog, connection, make_version):
    make_version()
    (move,) = catalog.list_moves(connection, A, "pirate", "latest")
    assert (move.target, move.moved_by) == (Target(1), "key:key-1")
