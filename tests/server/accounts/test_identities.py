"""Identities of two gateways on one database, with clocks set by the tests."""

import asyncio

import pytest

from registry.errors import Forbidden, InvalidApiKey
from server.accounts import identities
from server.accounts.auth import digest
from server.accounts.identities import Identities
from server.accounts.keys import change_key, revoke_key, rotate_key
from server.accounts.tenants import TenantLimits, set_limits, suspend_tenant
from server.billing.budgets import HAS_HARD_BUDGET
from server.database.expiring_cache import TTL_S
from tests.server.factories import NOW_MS, PEPPER, Clock, make_key, make_tenant


def make_identities(database, **options):
    return Identities(database, PEPPER, has_hard_budget=HAS_HARD_BUDGET, **options)


class CountingDatabase:
    """A real database that counts its reads; `gate` delays their results."""

    def __init__(self, database):
        self._database = database
        self.num_reads = 0
        self.gate = None

    async def read(self, fn):
        self.num_reads += 1
        found = await self._database.read(fn)
        if self.gate is not None:
            await self.gate.wait()
        return found


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def counting(database):
    return CountingDatabase(database)


@pytest.fixture
def tenant(database):
    return make_tenant(database)


@pytest.fixture
def gateways(counting, clock):
    """The identities of two gateways, called here and there."""
    times = {"now_ms": lambda: NOW_MS + int(clock.now * 1000), "monotonic": clock}
    return make_identities(counting, **times), make_identities(counting, **times)


async def is_refused(gateway, plaintext, error=InvalidApiKey):
    try:
        await gateway.of(plaintext)
    except error:
        return True
    return False


def revoke(conn, tenant, key):
    revoke_key(conn, tenant.tenant_id, key.key_id, now_ms=NOW_MS)


def rotate(conn, tenant, key):
    rotate_key(conn, tenant.tenant_id, key.key_id, PEPPER, overlap_s=0, now_ms=NOW_MS)


def suspend(conn, tenant, key):
    suspend_tenant(conn, tenant.tenant_id, now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("end", "error"),
    [(revoke, InvalidApiKey), (rotate, InvalidApiKey), (suspend, Forbidden)],
)
async def test_what_ends_a_key_here_ends_it_at_once_and_there_within_two_seconds(
    database, gateways, clock, tenant, end, error
):
    key, plaintext = make_key(database, tenant)
    assert TTL_S <= 5
    here, there = gateways
    await asyncio.gather(here.of(plaintext), there.of(plaintext))
    await database.write(lambda conn: end(conn, tenant, key))
    here.forget(tenant.tenant_id)
    assert await is_refused(here, plaintext, error)
    clock.now = TTL_S - 0.001
    assert not await is_refused(there, plaintext)
    clock.now = TTL_S
    assert await is_refused(there, plaintext, error)


async def test_a_remembered_key_expires_to_the_millisecond(
    database, gateways, clock, counting, tenant
):
    _, plaintext = make_key(database, tenant, expires_at_ms=NOW_MS + 1000)
    clock.now = 0.999
    assert not await is_refused(gateways[0], plaintext)
    clock.now = 1.0
    assert await is_refused(gateways[0], plaintext)
    assert counting.num_reads == 1


async def test_changed_rights_and_limits_reach_the_other_gateway(database, gateways, clock, tenant):
    key, plaintext = make_key(database, tenant)
    tenant_id = tenant.tenant_id
    there = gateways[1]
    await there.of(plaintext)
    changes = {"scopes": frozenset({"usage:read"})}
    await database.write(lambda c: change_key(c, tenant_id, key.key_id, changes, now_ms=NOW_MS))
    limits = TenantLimits(requests_per_minute=7)
    await database.write(lambda c: set_limits(c, tenant_id, limits, now_ms=NOW_MS))
    clock.now = TTL_S
    identity = await there.of(plaintext)
    assert identity.scopes == {"usage:read"}
    assert [limit.amount for limit in identity.limits] == [7]


async def test_two_hundred_requests_at_once_are_one_read_and_the_next_are_none(
    database, gateways, counting, tenant
):
    _, plaintext = make_key(database, tenant)
    found = await asyncio.gather(*(gateways[0].of(plaintext) for _ in range(200)))
    assert len({id(identity) for identity in found}) == 1
    await gateways[0].of(plaintext)
    assert counting.num_reads == 1


async def test_the_first_to_ask_may_leave_without_taking_the_others_along(
    database, gateways, counting, tenant
):
    _, plaintext = make_key(database, tenant)
    counting.gate = asyncio.Event()
    first, second = (asyncio.create_task(gateways[0].of(plaintext)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    counting.gate.set()
    assert (await second).tenant_id == tenant.tenant_id
    assert counting.num_reads == 1


async def test_a_read_from_before_a_change_is_not_remembered_after_it(
    database, gateways, counting, tenant
):
    key, plaintext = make_key(database, tenant)
    here = gateways[0]
    counting.gate = asyncio.Event()
    early = asyncio.create_task(here.of(plaintext))
    while counting.num_reads == 0:
        await asyncio.sleep(0)
    await asyncio.wait_for(database.read(lambda _: None), 10)
    await database.write(lambda c: revoke(c, tenant, key))
    here.forget(tenant.tenant_id)
    counting.gate.set()
    await asyncio.gather(early, return_exceptions=True)
    assert await is_refused(here, plaintext)


async def test_unknown_keys_and_suspended_tenants_are_asked_for_each_time(
    database, gateways, counting, tenant
):
    _, plaintext = make_key(database, tenant)
    body = plaintext[:-6]
    other = body[:-1] + ("0" if body[-1] != "0" else "1")
    unknown = other + identities.auth._checksum(other)
    for _ in range(3):
        assert await is_refused(gateways[0], unknown)
    await database.write(lambda c: suspend_tenant(c, tenant.tenant_id, now_ms=NOW_MS))
    for _ in range(3):
        assert await is_refused(gateways[0], plaintext, Forbidden)
    assert counting.num_reads == 6


async def test_no_more_are_remembered_than_the_limit_and_none_in_the_clear(
    database, counting, clock
):
    tenants = [make_tenant(database, f"t{number}") for number in range(3)]
    plaintexts = [make_key(database, tenant)[1] for tenant in tenants]
    gateway = make_identities(counting, monotonic=clock, max_identities=2)
    for plaintext in plaintexts:
        await gateway.of(plaintext)
    entries = gateway._identities._entries
    assert list(entries) == [digest(PEPPER, text) for text in plaintexts[1:]]
    assert not any(text.split("-")[3] in repr(entries) for text in plaintexts)
    gateway.forget(tenants[1].tenant_id)
    assert len(entries) == 1
