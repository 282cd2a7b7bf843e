"""Sessions of the console: what ends them, and what a request in one must have."""

import asyncio
from dataclasses import dataclass, field

import pytest
import sqlalchemy as sa

from registry.errors import InvalidApiKey, Limited
from registry.tables import audit_log
from server.accounts.admin_key import AdminKey
from server.accounts.auth import Identity
from server.accounts.identities import Identities
from server.accounts.keys import create_key, revoke_key
from server.accounts.sessions import (
    LIFETIME_S,
    MAX_SESSIONS,
    MAX_SIGN_INS,
    MAX_SIGN_INS_OF_TENANT,
    Sessions,
    csrf_token,
)
from server.accounts.tables import console_sessions
from server.accounts.tenants import suspend_tenant
from server.billing.budgets import HAS_HARD_BUDGET
from server.database.database import Database
from tests.refusals import refused
from tests.server.factories import NOW_MS, make_tenant

PEPPER = "pepper"


@dataclass
class World:
    database: Database
    admin: AdminKey = field(default_factory=lambda: AdminKey("the-operator"))
    now_ms: int = NOW_MS
    ticks: float = 0.0

    def __post_init__(self) -> None:
        clock = {"now_ms": lambda: self.now_ms, "monotonic": self._tick}
        identities = Identities(self.database, PEPPER, has_hard_budget=HAS_HARD_BUDGET, **clock)
        self.sessions = Sessions(self.database, PEPPER, self.admin, identities, **clock)
        self.tenant = make_tenant(self.database, "acme")
        self.key = self.make_key()

    def _tick(self) -> float:
        """Nothing is remembered from one call to the next."""
        self.ticks += 10
        return self.ticks

    def make_key(self, **options) -> str:
        return self.database.write_sync(
            lambda c: create_key(
                c, self.tenant.tenant_id, "a key", PEPPER, now_ms=NOW_MS, **options
            )
        )[1]

    def begin(self, key: str = "") -> str:
        return asyncio.run(self.sessions.begin(key or self.key))

    def identity(self, token: str) -> Identity:
        return asyncio.run(self.sessions.identity_of(token))

    def is_operators(self, token: str) -> bool:
        return asyncio.run(self.sessions.is_operators(token))


@pytest.fixture
def world(sqlite_database: Database) -> World:
    return World(sqlite_database)


def test_a_session_has_the_identity_of_its_key(world: World) -> None:
    found = world.identity(world.begin(world.make_key(scopes=frozenset({"usage:read"}))))
    assert found.tenant_id == world.tenant.tenant_id
    assert found.scopes == {"usage:read"}
    assert not world.is_operators(world.begin())


def test_a_wrong_key_begins_no_session(world: World) -> None:
    with pytest.raises(InvalidApiKey):
        world.begin(world.key[:-1] + "x")


def test_a_session_ends_after_twelve_hours(world: World) -> None:
    token = world.begin()
    world.now_ms += LIFETIME_S * 1000 - 1
    assert world.identity(token)
    world.now_ms += 1
    with pytest.raises(InvalidApiKey):
        world.identity(token)


def test_a_session_ends_with_its_key(world: World) -> None:
    token = world.begin()
    identity = world.identity(token)
    world.database.write_sync(
        lambda c: revoke_key(c, identity.tenant_id, identity.key_id, now_ms=NOW_MS)
    )
    with pytest.raises(InvalidApiKey):
        world.identity(token)


def test_a_session_of_a_suspended_tenant_is_refused_by_name(world: World) -> None:
    token = world.begin()
    world.database.write_sync(lambda c: suspend_tenant(c, world.tenant.tenant_id, now_ms=NOW_MS))
    with refused("tenant_suspended"):
        world.identity(token)


def test_an_ended_session_is_over_at_once(world: World) -> None:
    token, other = world.begin(), world.begin()
    asyncio.run(world.sessions.end(token))
    with pytest.raises(InvalidApiKey):
        world.identity(token)
    assert world.identity(other)
    asyncio.run(world.sessions.end(token))  # and ending it again does nothing


@pytest.mark.parametrize("token", ["", "a-strangers", "x" * 100_000])
def test_ending_a_session_that_there_is_not_changes_nothing(world: World, token: str) -> None:
    asked: list[str] = []
    note = lambda *told: asked.append(told[2].split()[0])  # noqa: E731
    sa.event.listen(world.database.engine, "before_cursor_execute", note)
    asyncio.run(world.sessions.end(token))
    assert not {"INSERT", "UPDATE", "DELETE"} & set(asked)


def test_the_operators_session_ends_when_the_admin_key_is_replaced(world: World) -> None:
    token = world.begin("the-operator")
    assert world.is_operators(token)
    with pytest.raises(InvalidApiKey):
        world.identity(token)  # it is no tenant's
    world.admin.key = "another"
    with pytest.raises(InvalidApiKey):
        world.is_operators(token)


def test_a_key_has_a_bounded_number_of_sessions_and_the_newest_stay(each_database) -> None:
    world, tokens = World(each_database), []
    for _ in range(MAX_SESSIONS + 2):
        world.now_ms += 10_000
        tokens.append(world.begin())
    other = world.begin(world.make_key())
    for token in tokens[:2]:
        with pytest.raises(InvalidApiKey):
            world.identity(token)
    for token in (*tokens[2:], other):
        assert world.identity(token)


def test_expired_sessions_are_deleted_when_another_begins(world: World) -> None:
    world.begin()
    world.now_ms += LIFETIME_S * 1000
    world.begin(world.make_key())
    with world.database.begin() as conn:
        assert conn.scalar(sa.select(sa.func.count()).select_from(console_sessions)) == 1


def test_the_database_holds_neither_token_nor_key(world: World) -> None:
    token = world.begin()
    with world.database.begin() as conn:
        row = conn.execute(sa.select(console_sessions)).one()
    assert token not in repr(row)
    assert world.key not in repr(row)


def test_beginning_and_ending_are_in_the_tenants_part_of_the_audit_log(world: World) -> None:
    asyncio.run(world.sessions.end(world.begin()))
    with world.database.begin() as conn:
        columns = audit_log.c
        rows = conn.execute(
            sa.select(columns.action, columns.actor, columns.tenant_id).where(
                columns.action.startswith("session.")
            )
        ).all()
    assert [action for action, _, _ in rows] == ["session.begin", "session.end"]
    assert all(actor.startswith("key:") for _, actor, _ in rows)
    assert {tenant_id for _, _, tenant_id in rows} == {world.tenant.tenant_id}


def test_the_csrf_token_is_another_for_each_session(world: World) -> None:
    tokens = {csrf_token(world.begin()) for _ in range(3)}
    assert len(tokens) == 3


@pytest.mark.parametrize("token", ["", "x", "x" * 100_000, "ä"])
def test_a_garbled_token_is_no_session(world: World, token: str) -> None:
    with pytest.raises(InvalidApiKey):
        world.identity(token)


def test_a_key_signs_in_so_often_within_a_minute_also_if_it_signs_out_and_refusals_write_nothing(
    world: World,
) -> None:
    for _ in range(MAX_SIGN_INS):
        asyncio.run(world.sessions.end(world.begin()))
        world.now_ms += 1000
    lines = sa.select(sa.func.count()).select_from(audit_log)
    before = world.database.read_sync(lambda c: c.scalar(lines))
    for _ in range(3):
        with pytest.raises(Limited, match="This key has signed in 20 times") as refused:
            world.begin()
    assert refused.value.retry_after_s == 60 - MAX_SIGN_INS
    assert world.database.read_sync(lambda c: c.scalar(lines)) == before
    world.now_ms += int(refused.value.retry_after_s * 1000)
    assert world.begin()


def test_a_tenant_does_not_sign_in_more_often_with_many_keys(world: World) -> None:
    for _ in range(MAX_SIGN_INS_OF_TENANT // MAX_SIGN_INS):
        key = world.make_key()
        for _ in range(MAX_SIGN_INS):
            world.begin(key)
    with pytest.raises(Limited, match="Your account"):
        world.begin(world.make_key())
    assert world.begin("the-operator")
