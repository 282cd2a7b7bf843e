"""Offers on both sides: what an owner may find out, and what reaches the addressee."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, insert, select

from registry.catalog import adapter_rows, grants, offers, received_offers
from registry.catalog.adapter_rows import Adapter
from registry.catalog.offers import KEPT_MS, MAX_OFFERS
from registry.catalog.received_offers import MAX_LISTED, MAX_LISTED_PER_OWNER, Addressee
from registry.errors import QuotaExceeded
from registry.tables import (
    adapter_aliases,
    adapter_grants,
    adapter_offers,
    adapter_versions,
    adapters,
    audit_log,
)
from tests.refusals import refused
from tests.registry.rows import add_version

A, C = "tenant-a", "tenant-c"
MADE_MS = 1000
NOW_MS = 2000
BOB = Addressee("ten_0000000000000b0b", ("ten_0000000000000b0b", "bob"), MADE_MS)
CAROL = Addressee("ten_00000000000ca401", ("ten_00000000000ca401", "carol"), MADE_MS)


@pytest.fixture
def pirate(connection: Connection) -> Adapter:
    return make_adapter(connection, A, "pirate")


def make_adapter(conn: Connection, owner_id: str, name: str) -> Adapter:
    add_version(conn, owner_id, name)
    adapter = adapter_rows.find_adapter(conn, owner_id, name)
    assert adapter is not None
    return adapter


def offer(conn: Connection, adapter: Adapter, addressee: str = "bob", now_ms: int = NOW_MS) -> None:
    offers.offer(conn, adapter, addressee, actor="key:k1", now_ms=now_ms)


def accept(conn: Connection, to: Addressee = BOB, now_ms: int = NOW_MS) -> None:
    received_offers.accept(conn, to, A, "pirate", actor="key:k2", now_ms=now_ms)


def decline(conn: Connection, to: Addressee = BOB) -> None:
    received_offers.decline(conn, to, A, "pirate", actor="key:k2", now_ms=NOW_MS)


def pending(conn: Connection, to: Addressee = BOB, now_ms: int = NOW_MS) -> list[str]:
    return [found.name for found in received_offers.list_pending(conn, to, now_ms)[0]]


def accepted(conn: Connection, to: Addressee = BOB) -> list[str]:
    return [found.name for found in received_offers.list_accepted(conn, to.tenant_id)]


def seen_by_owner(conn: Connection, adapter: Adapter) -> list[str]:
    return [made.addressee for made in offers.list_made(conn, adapter, NOW_MS)]


@pytest.mark.parametrize("address", BOB.addresses)
def test_an_offer_shares_nothing_until_its_addressee_accepts(connection, pirate, address):
    offer(connection, pirate, address)
    assert (pending(connection), accepted(connection)) == (["pirate"], [])
    assert not grants.is_granted(connection, A, "pirate", BOB.tenant_id)
    for _ in range(2):
        accept(connection)
        assert grants.is_granted(connection, A, "pirate", BOB.tenant_id)
        assert (pending(connection), accepted(connection)) == ([], ["pirate"])
        assert seen_by_owner(connection, pirate) == []


def test_nobody_else_sees_an_offer_or_can_accept_it(connection, pirate):
    offer(connection, pirate)
    assert pending(connection, CAROL) == []
    for act in (accept, decline):
        with refused("offer_not_found"):
            act(connection, CAROL)
    assert pending(connection) == ["pirate"]


def test_an_offer_to_a_name_is_not_for_whoever_gets_the_name_later(connection, pirate):
    offer(connection, pirate, now_ms=MADE_MS)
    assert pending(connection) == []
    with refused("offer_not_found"):
        accept(connection)
    offer(connection, pirate, now_ms=MADE_MS + 1)
    assert pending(connection) == ["pirate"]


def test_a_declined_offer_looks_pending_to_its_owner_and_comes_back_to_nobody(connection, pirate):
    offer(connection, pirate)
    decline(connection)
    assert pending(connection) == []
    assert seen_by_owner(connection, pirate) == ["bob"]
    for address in ("bob", BOB.tenant_id):
        offer(connection, pirate, address)
    assert pending(connection) == []
    offers.withdraw(connection, pirate, "bob", actor="key:k1", now_ms=NOW_MS)
    offer(connection, pirate)
    assert pending(connection) == []
    accept(connection)
    assert accepted(connection) == ["pirate"]


def test_what_was_accepted_can_be_given_back_and_offered_again(connection, pirate):
    offer(connection, pirate)
    accept(connection)
    decline(connection)
    assert not grants.is_granted(connection, A, "pirate", BOB.tenant_id)
    assert grants.list_grants(connection, pirate) == []
    with refused("offer_not_found"):
        accept(connection)
    offer(connection, pirate)
    assert pending(connection) == ["pirate"]


@pytest.mark.parametrize("end", ["withdrawn", "over", "deleted"])
def test_an_ended_offer_cannot_be_accepted(connection, pirate, end):
    offer(connection, pirate)
    now_ms = NOW_MS + (KEPT_MS if end == "over" else 0)
    if end == "withdrawn":
        offers.withdraw(connection, pirate, "bob", actor="key:k1", now_ms=NOW_MS)
    if end == "deleted":
        offers.withdraw_all(connection, pirate)
    assert pending(connection, now_ms=now_ms) == []
    with refused("offer_not_found"):
        accept(connection, now_ms=now_ms)


def test_each_sides_audit_log_has_only_its_own_acts(connection, pirate):
    offer(connection, pirate)
    offer(connection, pirate)
    decline(connection)
    accept(connection)
    decline(connection)
    lines = select(audit_log.c.tenant_id, audit_log.c.action, audit_log.c.actor)
    assert connection.execute(lines.order_by(audit_log.c.audit_id)).all() == [
        (A, "offer.offered", "key:k1"),
        (BOB.tenant_id, "offer.declined", "key:k2"),
        (BOB.tenant_id, "offer.accepted", "key:k2"),
        (BOB.tenant_id, "offer.given_back", "key:k2"),
    ]


def test_a_text_that_is_no_name_is_refused(connection, pirate):
    for act in (offers.offer, offers.withdraw):
        with refused("invalid_name"):
            act(connection, pirate, "Bob\0", actor="key:k1", now_ms=NOW_MS)


# ---- limits ----


def test_an_adapters_limit_counts_grants_and_offers_alike(connection, pirate, monkeypatch):
    monkeypatch.setattr(grants, "MAX_GRANTS", 10)
    for number in range(grants.MAX_GRANTS - 1):
        offer(connection, pirate, f"tenant-{number}")
    offer(connection, pirate)
    for answer in (lambda: None, lambda: decline(connection), lambda: accept(connection)):
        answer()
        offer(connection, pirate, "tenant-7")
        with pytest.raises(QuotaExceeded, match=f"grants of {grants.MAX_GRANTS}"):
            offer(connection, pirate, "one-too-many")
    offers.withdraw(connection, pirate, "tenant-7", actor="key:k1", now_ms=NOW_MS)
    offer(connection, pirate, "one-too-many")


def test_an_owner_that_withdraws_its_offers_cannot_try_ever_more_names(connection, pirate):
    offer(connection, pirate, "somebody")
    offers.withdraw(connection, pirate, "somebody", actor="key:k1", now_ms=NOW_MS)
    row = connection.execute(select(adapter_offers)).mappings().one()
    others = [{**row, "addressee": f"n{number}"} for number in range(MAX_OFFERS - 1)]
    connection.execute(insert(adapter_offers), others)
    with pytest.raises(QuotaExceeded, match="offers"):
        offer(connection, pirate)
    offers.prune_offers(connection, NOW_MS + KEPT_MS)
    assert connection.execute(select(adapter_offers)).all() == []
    offer(connection, pirate)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, MAX_LISTED_PER_OWNER + 5), min_size=1, max_size=14))
def test_no_owners_offers_hide_anothers(numbers):
    engine = create_engine("sqlite://")
    adapters.create(engine)
    for table in (adapter_versions, adapter_aliases, adapter_grants, adapter_offers):
        table.create(engine)
    places = [(owner, i) for owner, number in enumerate(numbers) for i in range(number)]
    with engine.begin() as conn:
        conn.execute(insert(adapters), [adapter_row(*place) for place in places])
        conn.execute(insert(adapter_offers), [offer_row(*place) for place in places])
        found, has_more = received_offers.list_pending(conn, BOB, NOW_MS + len(numbers))
    engine.dispose()
    shown = [sum(o.owner_id == f"owner-{n}" for o in found) for n in range(len(numbers))]
    assert len(found) == min(MAX_LISTED, sum(min(n, MAX_LISTED_PER_OWNER) for n in numbers))
    assert has_more == (len(found) < sum(numbers))
    assert max(shown) <= MAX_LISTED_PER_OWNER
    for number, count in zip(numbers, shown, strict=True):
        assert count >= min(number, max(shown) - 1), (
            "an owner's next place comes before others' later"
        )


def adapter_row(owner: int, number: int) -> dict[str, Any]:
    return {
        "adapter_id": f"ad-{owner}-{number}",
        "tenant_id": f"owner-{owner}",
        "name": f"a{number}",
        "created_at_ms": 0,
    }


def offer_row(owner: int, number: int) -> dict[str, Any]:
    return {
        "adapter_id": f"ad-{owner}-{number}",
        "addressee": "bob",
        "tenant_id": f"owner-{owner}",
        "offered_at_ms": NOW_MS + owner,
        "offered_by": "key:k1",
        "is_withdrawn": False,
        "is_declined": False,
    }
