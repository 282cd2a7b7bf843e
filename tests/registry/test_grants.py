import pytest
from sqlalchemy import select

from registry.catalog import adapter_rows, grants
from registry.catalog.received_offers import list_accepted
from registry.tables import adapter_events, audit_log
from tests.registry.rows import add_version

A, B, C = "tenant-a", "tenant-b", "tenant-c"
BASE = "b" * 64


@pytest.fixture
def pirate(connection):
    add_version(connection, A, "pirate")
    return adapter_rows.find_adapter(connection, A, "pirate")


def grant(connection, adapter, grantee_id, now_ms=5):
    grants.grant(connection, adapter, grantee_id, granted_by="key:k1", now_ms=now_ms)


def revoke(connection, adapter, grantee_id):
    grants.revoke(connection, adapter, grantee_id, actor="key:k1", now_ms=9)


def told(connection, adapter):
    """(kind, tenant_id) of the events, which are all of this adapter."""
    rows = connection.execute(select(adapter_events).order_by(adapter_events.c.event_id)).all()
    assert {row.adapter_id for row in rows} == {adapter.adapter_id}
    return [(row.kind, row.tenant_id) for row in rows]


def test_a_grant_lets_its_tenant_in_and_nobody_else(connection, pirate):
    assert not grants.is_granted(connection, A, "pirate", B)
    grant(connection, pirate, B)
    assert grants.is_granted(connection, A, "pirate", B)
    assert not grants.is_granted(connection, A, "pirate", C)
    assert not grants.is_granted(connection, A, "parrot", B)


def test_grants_are_counted_by_adapter_for_their_owner_alone(connection, pirate):
    ids = [pirate.adapter_id, add_version(connection, A, "parrot")]
    for grantee in (B, C):
        grant(connection, pirate, grantee)
    assert grants.count_grants(connection, A, ids) == {pirate.adapter_id: 2}
    assert grants.count_grants(connection, B, ids) == {}


def test_a_grant_is_of_one_adapter_not_of_a_name(connection, pirate):
    add_version(connection, C, "pirate")
    grant(connection, pirate, B)
    assert not grants.is_granted(connection, C, "pirate", B)
    assert grants.list_grants(connection, adapter_rows.find_adapter(connection, C, "pirate")) == []


def test_a_revoked_grant_is_over_at_once(connection, pirate):
    grant(connection, pirate, B)
    grant(connection, pirate, C)
    revoke(connection, pirate, B)
    assert not grants.is_granted(connection, A, "pirate", B)
    assert grants.is_granted(connection, A, "pirate", C)
    assert list_accepted(connection, B, [BASE]) == []


def test_granting_and_revoking_again_change_and_tell_nothing(connection, pirate):
    grant(connection, pirate, B, now_ms=5)
    grant(connection, pirate, B, now_ms=7)
    assert [found.granted_at_ms for found in grants.list_grants(connection, pirate)] == [5]
    revoke(connection, pirate, B)
    revoke(connection, pirate, B)
    assert told(connection, pirate) == [("granted", A), ("revoked", A), ("ungranted", B)]
    actions = connection.execute(select(audit_log.c.action, audit_log.c.detail)).all()
    assert actions == [("adapter.revoked", B)]


def test_what_is_shared_is_listed_with_its_owner_while_it_can_be_served(connection, pirate):
    add_version(connection, A, "old", base_revision="0" * 64)
    add_version(connection, C, "beta")
    for owner, name in ((A, "pirate"), (A, "old"), (C, "beta")):
        grant(connection, adapter_rows.find_adapter(connection, owner, name), B)
    shared = list_accepted(connection, B, [BASE])
    assert [(s.owner_id, s.name) for s in shared] == [(A, "pirate"), (C, "beta")]
    assert list_accepted(connection, A, [BASE]) == []
    of_both = list_accepted(connection, B, [BASE, "0" * 64])
    assert [(s.name, s.base.revision) for s in of_both] == [
        ("old", "0" * 64), ("pirate", BASE), ("beta", BASE),
    ]  # fmt: skip
    assert list_accepted(connection, B, []) == []


def test_all_grants_go_at_once(connection, pirate):
    for grantee in (B, C):
        grant(connection, pirate, grantee)
    grants.revoke_all(connection, pirate, actor="key:k1", now_ms=9)
    assert grants.list_grants(connection, pirate) == []
    ends = [[("revoked", A), ("ungranted", grantee)] for grantee in (B, C)]
    assert told(connection, pirate) == [("granted", A)] * 2 + ends[0] + ends[1]
