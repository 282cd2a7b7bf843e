import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import Invalid, InvalidApiKey, NotFound
from registry.tables import audit_log
from server.accounts.auth import (
    digest,
    identify,
    parse_key,
)
from server.accounts.key_uses import record_key_uses
from server.accounts.keys import DEFAULT_SCOPES, list_keys, revoke_key
from server.accounts.tables import api_keys
from server.accounts.tenants import (
    TenantLimits,
    create_tenant,
    get_tenant,
    list_tenants,
    resume_tenant,
    set_limits,
    suspend_tenant,
)
from server.billing.budgets import HAS_HARD_BUDGET
from tests.refusals import refused
from tests.server.factories import NOW_MS, PEPPER, make_key, make_tenant

SOME_KEY = "sk-chorale-0123456789ab-" + "0" * 32


def log_in(database, plaintext, pepper=PEPPER, now_ms=NOW_MS):
    key = parse_key(plaintext), digest(pepper, plaintext)
    return database.read_sync(lambda conn: identify(conn, *key, now_ms, HAS_HARD_BUDGET))


def test_a_key_identifies_its_tenant_and_carries_its_limits(database):
    tenant = make_tenant(database, requests_per_minute=60, weight=2.0)
    key, plaintext = make_key(database, tenant)
    identity = log_in(database, plaintext)
    assert (identity.tenant_id, identity.tenant_name) == (tenant.tenant_id, "acme")
    assert (identity.key_id, identity.scopes) == (key.key_id, DEFAULT_SCOPES)
    assert [(limit.metric, limit.amount) for limit in identity.limits] == [("requests", 60)]
    assert (identity.weight, identity.cache_salt) == (2.0, tenant.cache_salt)
    assert identity.allows("inference")
    assert not identity.allows("keys")


def test_a_key_has_the_form_that_secret_scanners_are_told(database):
    key, plaintext = make_key(database, make_tenant(database))
    assert plaintext.startswith(f"sk-chorale-{key.key_id}-")
    assert len(plaintext) == len("sk-chorale-") + 12 + 1 + 32 + 6
    assert parse_key(plaintext) == key.key_id


def test_nothing_stored_or_shown_lets_one_log_in(database):
    tenant = make_tenant(database)
    key, plaintext = make_key(database, tenant)
    secret = plaintext.removeprefix(f"{key.prefix}-")
    rows = database.read_sync(lambda c: [tuple(row) for row in c.execute(sa.select(api_keys))])
    rows += database.read_sync(lambda c: [tuple(row) for row in c.execute(sa.select(audit_log))])
    shown = repr(rows) + repr(key) + repr(log_in(database, plaintext))
    assert secret not in shown
    assert tenant.cache_salt not in repr(tenant) + repr(log_in(database, plaintext))


def test_every_bad_key_fails_alike(database):
    tenant = make_tenant(database)
    _, plaintext = make_key(database, tenant)
    revoked, revoked_text = make_key(database, tenant)
    _, expired = make_key(database, tenant, expires_at_ms=NOW_MS)
    database.write_sync(lambda c: revoke_key(c, tenant.tenant_id, revoked.key_id, now_ms=NOW_MS))
    _, unknown = make_key(database, tenant)
    database.write_sync(lambda c: c.execute(sa.delete(api_keys).where(_is(unknown))))
    garbled = plaintext[:-1] + ("0" if plaintext[-1] != "0" else "1")
    for bad in (revoked_text, expired, unknown, garbled, "", "sk-chorale-", SOME_KEY):
        with pytest.raises(InvalidApiKey):
            log_in(database, bad)
    with pytest.raises(InvalidApiKey):
        log_in(database, plaintext, pepper="another")
    assert log_in(database, plaintext).tenant_id == tenant.tenant_id


def _is(plaintext):
    return api_keys.c.key_id == parse_key(plaintext)


def test_the_id_of_another_key_does_not_help(database):
    tenant = make_tenant(database)
    keys = [make_key(database, tenant)[1] for _ in range(2)]
    mixed = keys[0][:24] + keys[1][24:]
    with pytest.raises(InvalidApiKey):
        log_in(database, mixed)


def test_a_suspended_tenant_is_told_so_only_with_a_good_key(database):
    tenant = make_tenant(database)
    _, plaintext = make_key(database, tenant)
    database.write_sync(lambda c: suspend_tenant(c, tenant.tenant_id, now_ms=NOW_MS))
    with refused("tenant_suspended"):
        log_in(database, plaintext)
    with pytest.raises(InvalidApiKey):
        log_in(database, plaintext, pepper="another")
    database.write_sync(lambda c: resume_tenant(c, tenant.tenant_id, now_ms=NOW_MS))
    assert log_in(database, plaintext)


def test_revoking_twice_keeps_the_first_time(each_database):
    tenant = make_tenant(each_database)
    key, _ = make_key(each_database, tenant)
    for now_ms in (NOW_MS + 1, NOW_MS + 2):
        each_database.write_sync(
            lambda c, now_ms=now_ms: revoke_key(c, tenant.tenant_id, key.key_id, now_ms=now_ms)
        )
    assert each_database.read_sync(lambda c: list_keys(c, tenant.tenant_id))[0].revoked_at_ms == (
        NOW_MS + 1
    )


def test_last_use_never_moves_back(each_database):
    tenant = make_tenant(each_database)
    key, _ = make_key(each_database, tenant)
    for at_ms in (NOW_MS + 5, NOW_MS + 3):
        each_database.write_sync(lambda c, at_ms=at_ms: record_key_uses(c, {key.key_id: at_ms}))
    [listed] = each_database.read_sync(lambda c: list_keys(c, tenant.tenant_id))
    assert listed.last_used_at_ms == NOW_MS + 5


@given(st.text(max_size=80) | st.from_regex(r"\Ask-chorale-[\w'\";-]{12}-\w{38}\n?\Z"))
def test_text_that_is_no_key_never_reaches_the_database(text):
    with pytest.raises(InvalidApiKey):
        parse_key(text)


# ---- tenants ----


def test_a_tenant_is_found_by_id_and_by_name(database):
    tenant = make_tenant(database)
    for name in (tenant.tenant_id, "acme"):
        assert database.read_sync(lambda c, name=name: get_tenant(c, name)) == tenant
    assert database.read_sync(list_tenants) == [tenant]
    with refused("tenant_not_found"):
        database.read_sync(lambda c: get_tenant(c, "globex"))


def test_a_tenant_cannot_pass_for_another_by_taking_its_id_as_name(database):
    tenant = make_tenant(database)
    make_tenant(database, tenant.tenant_id)
    assert database.read_sync(lambda c: get_tenant(c, tenant.tenant_id)) == tenant


def test_two_tenants_cannot_have_one_name(each_database):
    make_tenant(each_database)
    with refused("tenant_name_taken"):
        make_tenant(each_database)


@pytest.mark.parametrize("name", ["", "Acme", "-a", "a/b", "a" * 65, "a b", "ä"])
def test_a_name_that_cannot_be_part_of_a_model_name_is_refused(database, name):
    with pytest.raises(Invalid):
        database.write_sync(lambda c: create_tenant(c, name, now_ms=NOW_MS))


def test_limits_are_replaced_as_a_whole(database):
    tenant = make_tenant(database, requests_per_minute=60)
    limits = TenantLimits(tokens_per_minute=1000)
    database.write_sync(lambda c: set_limits(c, tenant.tenant_id, limits, now_ms=NOW_MS))
    changed = database.read_sync(lambda c: get_tenant(c, "acme"))
    assert (changed.requests_per_minute, changed.tokens_per_minute) == (None, 1000)
    for name in ("ten_none", tenant.tenant_id):
        bad = limits if name == "ten_none" else TenantLimits(tokens_per_minute=0)
        with pytest.raises((NotFound, Invalid)):
            database.write_sync(lambda c, n=name, b=bad: set_limits(c, n, b, now_ms=NOW_MS))
