"""Every route that manages something writes an audit line with its actor and without secrets."""

import asyncio
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from registry.catalog.audit import record_audit
from registry.tables import audit_log
from server.accounts import audit_log as log
from server.accounts.tenants import create_tenant
from server.billing.audit.report import Finding
from server.database.clock import now_ms
from server.database.database import Database
from tests.server.api.test_isolation import (
    ABOUT_THE_CALLER,
    OPERATOR,
    ROUTES,
    SUBJECTS,
    World,
    empty,
    filled,
    kind_of,
    requests,
    world,
)
from tests.server.factories import NOW_MS
from tests.server.fake_engines import make_suspects
from tests.server.in_process import InProcess

__all__ = ["empty", "filled", "world"]  # fixtures that tests use by name

MANAGES = ("PUT", "POST", "PATCH", "DELETE")
# These routes change no settings; the result of an upload is audited when it is published.
MANAGE_NOTHING = {
    "POST /tokenize", "POST /detokenize",
    "POST /v1/chat/completions", "POST /v1/completions",
    "POST /v1/chat/completions/{answer_id}/cancel",
    "POST /v1/adapters:validate", "POST /admin/v1/billing/simulate",
    "POST /v1/adapters/{name}/uploads", "PUT /v1/uploads/{upload_id}/files/{filename}",
    "DELETE /v1/uploads/{upload_id}", "POST /v1/uploads/{upload_id}/complete",
    "POST /v1/adapters/{name}/versions/{version}/prove",
    "POST /v1/webhook/test", "POST /admin/v1/tenants/{tenant}/webhook/test",
}  # fmt: skip
MANAGING = [route for route in ROUTES if route.startswith(MANAGES) and route not in MANAGE_NOTHING]
# The world's usage was posted without a journal, which the audit finds.
FINDING = Finding(
    check="journals",
    subject="engine engine-1",
    detail="ends, prompt, cached and completion tokens without an event",
    expected=(0, 0, 0, 0),
    found=(0, -7, 0, -5),
)
BODIES = {
    "POST /admin/v1/audit/acknowledgements": {"finding_id": FINDING.finding_id, "reason": "known"},
    "POST /admin/v1/models": {"name": "extra", "model": "a/model"},
    "POST /admin/v1/prices": {"prompt_nanousd": 1, "cached_nanousd": 1, "completion_nanousd": 1},
    "POST /admin/v1/statements": {"period": "2026-02"},
    "PATCH /admin/v1/tenants/{tenant}/keys/{key_id}": {"name": "new"},
    "POST /admin/v1/tenants/{tenant}/keys/{key_id}/rotate": {"overlap_s": 60},
    "POST /v1/keys/{key_id}/rotate": {"overlap_s": 60},
}


def lines(product: InProcess) -> list[sa.Row[tuple[object, ...]]]:
    query = sa.select(audit_log).order_by(audit_log.c.audit_id)
    return product.gateway.database.read_sync(lambda conn: list(conn.execute(query)))


def subjects_of(route: str) -> list[str]:
    if route in OPERATOR or route in ABOUT_THE_CALLER:
        return SUBJECTS["key_id"]
    return SUBJECTS[kind_of(route)]


def test_what_is_said_to_manage_nothing_is_there() -> None:
    assert set(ROUTES) >= MANAGE_NOTHING


def test_every_act_of_management_leaves_a_line(world: World) -> None:
    """The first request of each route that changes something leaves its actor and no secret."""
    product = world.product
    product.engines.suspects = make_suspects()
    actors = {True: "operator", False: f"key:{world.acme.api_key.split('-')[2]}"}
    shown = [product.gateway.pepper, world.acme.api_key]
    num_seen = len(lines(product))
    for route in sorted(MANAGING, key=late):
        user = product.operator if route in OPERATOR else world.acme
        headers = {"idempotency-key": route.replace(" ", "-")}
        for subject in subjects_of(route):
            for method, path, body in requests(route, subject):
                answer = user.call(method, path, BODIES.get(route, body), headers)
                if answer.is_success:
                    made = answer.json()
                    shown += [made[name] for name in ("api_key", "secret") if made.get(name)]
                if left := lines(product)[num_seen:]:
                    break
            else:
                continue
            break
        assert left, f"{route}: {answer.text}"
        assert {line.actor for line in left} == {actors[route in OPERATOR]}, route
        num_seen += len(left)
    assert not any(secret.split("-")[-1] in repr(lines(product)) for secret in shown)


def late(route: str) -> tuple[bool, bool, str]:
    """Sort key that puts deletions, then suspensions, after the routes that need the objects."""
    return route.endswith("/suspend"), route.startswith("DELETE"), route


@pytest.fixture(scope="module")
def told(filled: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The filled world with seven more audit lines of acme and one without a tenant."""
    world = filled.copy(tmp_path_factory.mktemp("told"))

    def write(conn: sa.Connection) -> None:
        for number in range(8):
            record_audit(
                conn, world.acme.tenant_id if number else None, "test.act", target=str(number),
                at_ms=NOW_MS + number * 1000, actor=f"key:k{number % 2}",
            )  # fmt: skip

    world.product.gateway.database.write_sync(write)
    yield world
    world.product.close()


@pytest.fixture
def product(told: World) -> InProcess:
    return told.product


def targets(answer: object) -> list[str]:
    return [line["target"] for line in answer.json()["data"]]  # type: ignore[attr-defined]


def test_pages_hold_every_line_once_the_newest_first(product: InProcess) -> None:
    seen: list[str] = []
    query = "action=test.act&limit=3"
    while True:
        page = product.operator.call("GET", f"/admin/v1/audit-log?{query}").json()
        seen += [line["target"] for line in page["data"]]
        assert page["last_id"] == page["data"][-1]["audit_id"]
        if not page["has_more"]:
            break
        query = f"action=test.act&limit=3&after={page['last_id']}"
    assert seen == list("76543210")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("tenant=acme", "7654321"),
        ("tenant=globex", ""),
        ("actor=key:k1", "7531"),
        (f"start={NOW_MS // 1000 + 2}&end={NOW_MS // 1000 + 4}", "32"),
    ],
)
def test_an_operator_reads_what_it_asks_for(product: InProcess, query: str, found: str) -> None:
    answer = product.operator.call("GET", f"/admin/v1/audit-log?action=test.act&{query}")
    assert targets(answer) == list(found)


def test_a_tenants_admin_reads_what_its_keys_did_and_nothing_else(told: World) -> None:
    told.product.gateway.database.write_sync(
        lambda conn: create_tenant(conn, "fresh", now_ms=NOW_MS, actor="key:k1")
    )
    data = told.acme.call("GET", "/v1/audit-log?limit=1000").json()["data"]
    assert [line["target"] for line in data if line["action"] == "test.act"] == list("7654321")
    assert {line["tenant_id"] for line in data} == {told.acme.tenant_id}
    assert not [line for line in data if not line["actor"].startswith("key:")]
    assert told.globex.call("GET", "/v1/audit-log").json()["data"] == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "after=x", "actor=a%00b", "start=yesterday", "tenant=%00"]
)
def test_what_cannot_be_asked_is_refused(product: InProcess, query: str) -> None:
    assert product.operator.call("GET", f"/admin/v1/audit-log?{query}").status_code == 400


def test_lines_older_than_the_operator_keeps_them_are_deleted_in_batches(
    each_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PRUNED_AT_ONCE", 2)
    day_ms, now = 86_400_000, now_ms()
    for age_days in (400, 31, 31, 31, 29, 0):
        at_ms = now - age_days * day_ms
        each_database.write_sync(
            lambda c, at_ms=at_ms: record_audit(
                c, None, "a.b", target="it", at_ms=at_ms, actor="operator"
            )
        )
    asyncio.run(log.prune(each_database, 30))
    kept = each_database.read_sync(lambda c: list(c.scalars(sa.select(audit_log.c.at_ms))))
    assert sorted(kept) == [now - 29 * day_ms, now]
