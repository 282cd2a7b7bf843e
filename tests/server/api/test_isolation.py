"""Objects of another tenant are answered as absent ones: on all routes, methods and kinds of ids.

The routes are read from the application. A new route fails here until this file says what it
names: the kind of id in its path, or that its answer concerns only the caller.
"""

import asyncio
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from registry.catalog.adapter_rows import find_adapter
from registry.catalog.offers import offer
from registry.tables import adapters, uploads
from registry.uploads.rows import (
    CANCELLED,
    COMPLETE,
    EXPIRED,
    FAILED,
    OPEN,
    PROVING,
    Upload,
    UploadFile,
    insert_upload,
)
from server.accounts.auth import ADAPTERS_READ, ADAPTERS_WRITE, ADMIN, INFERENCE, SCOPES, USAGE_READ
from server.accounts.keys import create_key, revoke_key
from server.accounts.tables import api_keys, tenants
from server.accounts.tenants import suspend_tenant
from server.api.app import create_app
from server.billing import ledger, prices
from server.billing.budgets import Budget, set_budget
from server.billing.exports.schedules import put_schedule
from server.billing.holds import insert_hold
from server.billing.settler import LEASE
from server.billing.tables import metadata
from server.database.clock import now_ms
from server.database.database import DEFAULT_FILE
from server.database.tables import leases
from server.pool.running import RunningRequest
from server.webhooks import events
from tests.registry.rows import add_version
from tests.server.factories import ENGINE, NOW_MS, SIGNER, make_end, make_hold
from tests.server.in_process import ADMIN_KEY, InProcess, User, make_app

METHODS = ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE", "OPTIONS")

# The application lists its routes without a gateway.
NO_GATEWAY: Any = SimpleNamespace(
    metrics=None, tracer=None, settings=SimpleNamespace(cors_origins=())
)
ROUTES = sorted(
    f"{method} {route.path}"
    for route in iter_route_contexts(create_app(NO_GATEWAY).routes)
    for method in route.methods or ()
)

STATES = (COMPLETE, OPEN, PROVING, FAILED, EXPIRED, CANCELLED)
ANSWER = "1234"

# ---- subject of every route ----

FOR_ALL = {
    "GET /", "GET /health", "GET /ready", "GET /metrics", "GET /openapi.json",
    "GET /v1/receipts/keys", "GET /version", "GET /look.css", "GET /stream.js",
}  # fmt: skip
# These routes name no id: they list the caller's objects, or check files for it.
ABOUT_THE_CALLER = {
    "GET /v1/usage/exports", "PUT /v1/usage/exports/{format}", "DELETE /v1/usage/exports/{format}",
    "GET /v1/adapters", "GET /v1/offers", "GET /v1/limits", "GET /v1/balance", "GET /v1/models",
    "GET /v1/usage", "GET /v1/usage/export", "GET /v1/keys", "POST /v1/keys", "GET /v1/audit-log",
    "GET /v1/statements", "GET /v1/statements/{period}",
    "POST /v1/adapters:validate", "GET /v1/organization/usage/completions",
    "GET /v1/organization/costs", "GET /v1/budgets", "GET /v1/webhook", "PUT /v1/webhook",
    "DELETE /v1/webhook", "POST /v1/webhook/test", "GET /v1/webhook/events",
    "GET /v1/routes", "PUT /v1/routes/{route}",
}  # fmt: skip
# A tenant's key reads its own usage on these routes; the operator's key reads everybody's.
FOR_BOTH = {route for route in ABOUT_THE_CALLER if "/organization/" in route}
# Every key may ask for its limits; the answer holds settings, not the tenant's objects.
FOR_ANY_KEY = {"GET /v1/limits"}
# These routes concern the base model, which all tenants share.
ABOUT_THE_MODEL = {"GET /tokenizer_info"}
OPENS = "POST /v1/adapters/{name}/uploads"
NAMED_IN_BODY = {
    "POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize",
}  # fmt: skip
SCOPE = {
    "receipts": USAGE_READ, "statements": USAGE_READ, "usage": USAGE_READ,
    "organization": USAGE_READ, "balance": USAGE_READ, "keys": ADMIN, "audit-log": ADMIN,
    "budgets": USAGE_READ, "webhook": ADMIN,
    "adapters": ADAPTERS_WRITE, "adapters:validate": ADAPTERS_WRITE, "uploads": ADAPTERS_WRITE,
    "GET adapters": ADAPTERS_READ, "offers": ADAPTERS_WRITE, "GET offers": ADAPTERS_READ,
    "routes": ADAPTERS_WRITE, "GET routes": ADAPTERS_READ,
    "chat": INFERENCE, "completions": INFERENCE, "models": INFERENCE,
    "tokenize": INFERENCE, "detokenize": INFERENCE, "tokenizer_info": INFERENCE,
}  # fmt: skip

OPERATOR = [route for route in ROUTES if " /admin/v1/" in route]
TENANT = [route for route in ROUTES if route not in FOR_ALL and route not in OPERATOR]
NAMING = [r for r in TENANT if r not in ABOUT_THE_CALLER | ABOUT_THE_MODEL | {OPENS}]

# ---- objects of the tenant acme ----

SUBJECTS = {
    "request_id": ["used", "chatcmpl-used", "entry_1"],
    "name": ["pirate", "ghost", "shared"],
    "adapter": ["offered", "accepted"],
    "route": ["cheap"],
    "upload_id": [f"up_{digit * 32}" for digit in "123456"],
    "answer_id": [f"chatcmpl-{ANSWER}"],
    "key_id": ["first", "second"],
    "model": [
        "pirate",
        "acme/pirate",
        "acme/pirate@1",
        "acme/pirate@beta",
        "acme/ghost",
        "ghost",
        "cheap",
    ],
}
ABSENT = {
    "request_id": "unused",
    "name": "parrot",
    "adapter": "parrot",
    "route": "parrot",
    "upload_id": f"up_{'0' * 32}",
    "answer_id": "chatcmpl-9999",
    "key_id": "third",
    "model": "parrot",
}
# Values of the other path parameters; some do not exist for the subject.
DETAILS = {
    "alias": ["beta", "gamma"],  # gamma never existed
    "version": ["3", "4", "9"],  # without aliases; 4 is deleted, 9 never existed
    "filename": ["adapter_config.json", "other"],
    "tenant": ["initech", "acme", "nobody"],
    "base_model": ["base", "extra"],
    "owner": ["initech"],
    "format": ["csv"],
    "period": ["2026-02"],
    "kind": ["monthly"],
    "enforcement": ["hard"],
    "engine_id": ["gone"],
    "fingerprint": ["1234567890"],
}
DECLARED = {
    name: {"size_bytes": 2, "sha256": "0" * 64}
    for name in ("adapter_config.json", "adapter_model.safetensors")
}
BODIES: dict[str, dict[str, Any]] = {
    OPENS: {"files": DECLARED},
    "POST /v1/adapters/{name}/versions/{version}/prove": {},
    "POST /v1/adapters:validate": {"files": DECLARED},
    "PUT /v1/adapters/{name}/aliases/{alias}": {"version": 1},
    "PUT /v1/usage/exports/{format}": {"interval": "day"},
    "PUT /v1/routes/{route}": {"strategy": "fallback", "models": [{"model": "base"}]},
    "PUT /admin/v1/routes/{route}": {"strategy": "fallback", "models": [{"model": "base"}]},
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "POST /v1/completions": {"prompt": "x"},
    "POST /tokenize": {"prompt": "x"},
    "POST /detokenize": {"tokens": [40]},
    "POST /admin/v1/tenants": {"name": "new"},
    "PATCH /admin/v1/tenants/{tenant}": {"weight": 2},
    "POST /admin/v1/tenants/{tenant}/keys": {"name": "new"},
    "PUT /v1/webhook": {"url": "https://hooks.example/x"},
    "PUT /admin/v1/tenants/{tenant}/webhook": {"url": "https://hooks.example/x"},
    "PUT /admin/v1/tenants/{tenant}/budgets/{kind}/{enforcement}": {"amount": "1"},
    "POST /v1/keys": {"name": "new"},
    "POST /v1/keys/{key_id}/rotate": {"overlap_s": 0},
    "PATCH /v1/keys/{key_id}": {"name": "new"},
    "POST /admin/v1/prices": {},
    "POST /admin/v1/statements": {"period": "2026-01"},
    "POST /admin/v1/tenants/{tenant}/credits": {"amount_usd": "1"},
    "POST /admin/v1/tenants/{tenant}/payments": {"amount_usd": "1"},
    "POST /admin/v1/corrections": {"entry_id": 1},
    "POST /admin/v1/audit/acknowledgements": {"finding_id": "0", "reason": "known"},
    "POST /admin/v1/billing/simulate": {"price_version": 1},
}


Request = tuple[str, str, Any]  # method, path, body
Answer = tuple[int, str, dict[str, str]]  # status, body, headers


@dataclass(frozen=True)
class World:
    """A gateway whose tenant acme has objects of every kind, or none yet; globex has none."""

    product: InProcess
    app: FastAPI
    acme: User
    globex: User

    def copy(self, folder: Path) -> "World":
        """A copy of the current state, for one test to change."""
        shutil.copytree(self.product.gateway.settings.data_dir, folder, dirs_exist_ok=True)
        return open_world(folder, self.acme, self.globex)

    def ask(self, key: str | None, asked: Sequence[Request]) -> list[Answer]:
        """Send the requests with this key; return the answers in order."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}

        async def ask_all() -> list[Answer]:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.app), base_url="http://gateway", headers=headers
            ) as client:
                return [
                    _answer(await client.request(method, path, json=body))
                    for method, path, body in asked
                ]

        return asyncio.run(ask_all())

    def rows(self) -> dict[str, list[Any]]:
        """All rows of the database, by table."""
        return self.product.gateway.database.read_sync(
            lambda conn: {
                table.name: conn.execute(sa.select(table)).all() for table in metadata.sorted_tables
            }
        )

    def key(self, user: User, *, scopes: frozenset[str] = SCOPES, **changes: Any) -> str:
        """Make another key of the user."""
        gateway = self.product.gateway
        return gateway.database.write_sync(
            lambda conn: create_key(
                conn, user.tenant_id, "k", gateway.pepper, now_ms=NOW_MS, scopes=scopes, **changes
            )
        )[1]


def fill(world: World) -> None:
    """Give acme objects of every kind, in every state."""

    def do(method: str, path: str, body: Any = None) -> None:
        answer = world.acme.call(method, f"/v1/adapters/{path}", body)
        assert answer.is_success, answer.text

    gateway = world.product.gateway
    gateway.database.write_sync(lambda conn: insert_rows(conn, world))
    version = gateway.database.read_sync(
        lambda conn: gateway.catalog.get_version(conn, world.acme.tenant_id, "pirate", 1)
    )
    stored = gateway.settings.data_dir / "object"
    stored.write_bytes(bytes(version.size_bytes))
    gateway.storage.put(version.object_key, stored)
    for name in SUBJECTS["name"]:
        for alias, version in (("latest", 1), ("beta", 1), ("beta", 2)):
            do("PUT", f"{name}/aliases/{alias}", {"version": version})
    for name in ("pirate", "shared"):
        do("PUT", f"{name}/grants/initech")
    assert world.acme.call("PUT", "/v1/offers/initech/accepted").is_success
    do("PUT", "pirate/pin")
    assert world.acme.call("PUT", "/v1/routes/cheap", BODIES["PUT /v1/routes/{route}"]).is_success
    do("DELETE", "pirate/versions/4")
    do("DELETE", "ghost")


def insert_rows(conn: sa.Connection, world: World) -> None:
    tenant_id = world.acme.tenant_id
    revision = world.product.gateway.bases.default.model.base_revision
    for name, number in itertools.product(SUBJECTS["name"], (1, 2, 3, 4)):
        # Version 3 is for a base model that is no longer served.
        base_revision = "0" * 64 if number == 3 else revision
        add_version(conn, tenant_id, name, number, base_revision=base_revision)
    initech = conn.scalar(sa.select(tenants.c.tenant_id).filter_by(name="initech"))
    for name in SUBJECTS["adapter"]:
        add_version(conn, initech, name, base_revision=revision)
        adapter = find_adapter(conn, initech, name)
        offer(conn, adapter, "acme", actor="key:k", now_ms=now_ms())
    for upload_id, state in zip(SUBJECTS["upload_id"], STATES, strict=True):
        insert_upload(conn, make_upload(tenant_id, upload_id, state))
    made_pirate = uploads.c.upload_id == SUBJECTS["upload_id"][0]
    pirate = sa.select(adapters.c.adapter_id).filter_by(name="pirate").scalar_subquery()
    conn.execute(sa.update(uploads).where(made_pirate).values(adapter_id=pirate, version=1))
    price = prices.get_price(conn, 1)
    hold = make_hold(price, "used", tenant_id=tenant_id)
    insert_hold(conn, hold)
    ledger.post(conn, SIGNER, ENGINE, [make_end(1, "used", tenant_id=tenant_id)], NOW_MS)
    put_schedule(conn, tenant_id, "csv", 3600, NOW_MS)
    budget = Budget(tenant_id=tenant_id, kind="monthly", enforcement="hard", amount_nanousd=10**12)
    set_budget(conn, budget, now_ms=NOW_MS)
    url = "https://hooks.example/acme"
    events.set_webhook(conn, tenant_id, url, now_ms=NOW_MS, actor="operator")
    events.insert_event(conn, events.new_event(tenant_id, "webhook.test", {}, now_ms=NOW_MS))
    for key_id in SUBJECTS["key_id"]:
        insert_key(conn, world.acme, key_id)
    lease = {"name": f"{LEASE}gone", "holder": "lost/1", "expires_at_ms": NOW_MS}
    conn.execute(sa.insert(leases).values(**lease))


def insert_key(conn: sa.Connection, user: User, key_id: str) -> None:
    """Insert a key that was made with the user's own key."""
    made_by = user.api_key.split("-")[2]
    made = sa.select(api_keys).where(api_keys.c.key_id == made_by)
    row = dict(conn.execute(made).mappings().one())
    row |= {"key_id": key_id, "created_by": made_by}
    conn.execute(sa.insert(api_keys).values(**row))


def make_upload(tenant_id: str, upload_id: str, state: str) -> Upload:
    """An upload for pirate of the files that OPENS declares, which expires far in the future."""
    return Upload(
        upload_id=upload_id,
        tenant_id=tenant_id,
        adapter_name="pirate",
        alias=None,
        state=state,
        created_by_key="k",
        created_at_ms=NOW_MS,
        expires_at_ms=4_000_000_000_000,
        files={
            name: UploadFile(name, received_bytes=0, **declared)
            for name, declared in DECLARED.items()
        },
    )


def open_world(folder: Path, *users: User) -> World:
    """Build a gateway on the folder's database. users: those that have keys; else they are made."""
    product = InProcess.build(folder, f"sqlite:///{folder / DEFAULT_FILE}")
    if users:
        users = tuple(replace(user, product=product) for user in users)
    else:
        users = product.user("acme", scopes=SCOPES), product.user("globex", scopes=SCOPES)
        product.user("initech")
    world = World(product, make_app(product.gateway), *users)
    product.gateway.bases.default.running.add(
        RunningRequest(ANSWER, world.acme.tenant_id, 1, 9, is_cold=False)
    )
    return world


@pytest.fixture(scope="module")
def empty(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("empty")
    shutil.copy(migrated_sqlite, folder / DEFAULT_FILE)
    world = open_world(folder)
    world.product.close()
    return world


@pytest.fixture(scope="module")
def filled(empty: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    world = empty.copy(tmp_path_factory.mktemp("filled"))
    fill(world)
    world.product.close()
    return world


@pytest.fixture
def world(filled: World, tmp_path: Path) -> Iterator[World]:
    world = filled.copy(tmp_path)
    yield world
    world.product.close()


@pytest.fixture(scope="module")
def read_world(filled: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A world for tests that change nothing in it."""
    world = filled.copy(tmp_path_factory.mktemp("read"))
    yield world
    world.product.close()


def requests(route: str, subject: str | None) -> list[Request]:
    """Requests of a route for this subject, one for each combination of its details."""
    method, _, path = route.replace(":path}", "}").partition(" ")
    body = BODIES.get(route, {} if method in ("PUT", "POST") else None)
    if route in NAMED_IN_BODY:
        body = {**BODIES[route], "model": subject}
    details = [name for name in DETAILS if f"{{{name}}}" in path]
    subjects = dict.fromkeys(SUBJECTS, subject)
    return [
        (method, path.format(**subjects, **dict(zip(details, values, strict=True))), body)
        for values in itertools.product(*(DETAILS[name] for name in details))
    ]


def kind_of(route: str) -> str:
    """The kind in SUBJECTS that the route names."""
    if route in NAMED_IN_BODY:
        return "model"
    kinds = [name for name in re.findall(r"\{(\w+)", route) if name in SUBJECTS]
    assert len(kinds) == 1, f"say what {route} is about: ABOUT_THE_CALLER, or a kind of SUBJECTS"
    return kinds[0]


def scope_of(route: str) -> str:
    """Scope of a route, by method and first part of its path, or by that part alone."""
    method, _, path = route.partition(" ")
    first = path.removeprefix("/v1").split("/")[1]
    scope = SCOPE.get(f"{method} {first}") or SCOPE.get(first)
    assert scope, f"say in SCOPE which scope {route} needs, or put it into FOR_ANY_KEY"
    return scope


def query_of(path: str) -> str:
    """Query of a time that includes all events, for paths that need one."""
    if "/organization/" in path:
        return f"?start_time={NOW_MS // 1000}&end_time={NOW_MS // 1000 + 60}"
    return "?start=1&end=9999999999" if "usage" in path else ""


def _answer(answer: httpx.Response) -> Answer:
    """The answer without headers that differ each time, and without the length of the id's text."""
    others = ("x-request-id", "date", "content-length", "openai-processing-ms")
    headers = {name: value for name, value in answer.headers.items() if name not in others}
    return answer.status_code, answer.text, headers


def hide(text: str, subject: str) -> str:
    return text.replace(subject, "...")


# ---- tests ----


def test_every_route_is_said_to_be_about_something() -> None:
    assert set(ROUTES) == FOR_ALL | set(OPERATOR) | set(TENANT)
    assert set(TENANT) >= ABOUT_THE_CALLER | NAMED_IN_BODY | {OPENS} | (BODIES.keys() - OPERATOR)
    assert {scope_of(route) for route in TENANT if route not in FOR_ANY_KEY} == {*SCOPE.values()}
    for route in NAMING:
        assert kind_of(route)


@pytest.mark.parametrize("route", NAMING)
def test_anothers_answers_as_one_that_is_not_there(
    request: pytest.FixtureRequest, route: str
) -> None:
    """The owner's same request succeeds, which shows that it is valid."""
    kind = kind_of(route)
    world = request.getfixturevalue("read_world" if route.startswith("GET ") else "world")
    if kind == "name":
        # The grant allows the use of `shared` and nothing else.
        world.acme.call("PUT", "/v1/adapters/shared/grants/globex")
        assert world.globex.call("PUT", "/v1/offers/acme/shared").is_success
    before = world.rows()
    absent = [
        (status, hide(text, ABSENT[kind]), headers)
        for status, text, headers in world.ask(world.globex.api_key, requests(route, ABSENT[kind]))
    ]
    assert {status for status, _, _ in absent} == {404}
    for subject in SUBJECTS[kind]:
        answers = world.ask(world.globex.api_key, requests(route, subject))
        assert [(s, hide(text, subject), h) for s, text, h in answers] == absent, subject
    assert world.rows() == before
    own = (
        answer
        for subject in SUBJECTS[kind]
        for asked in requests(route, subject)
        for answer in world.ask(world.acme.api_key, [asked])
    )
    assert any(200 <= status < 300 for status, _, _ in own)


def test_an_upload_under_anothers_name_is_opened_as_under_a_free_one(world: World) -> None:
    """The answers are the same even for files of which the other tenant has a version."""
    ids_and_times = re.compile(r"up_[0-9a-f]{32}|_at\":\d+")
    known = world.ask(world.acme.api_key, requests(OPENS, "pirate"))[0]
    assert '"state":"complete"' in known[1]
    there, absent = (
        (status, ids_and_times.sub("", hide(text, name)), headers)
        for name in ("pirate", ABSENT["name"])
        for status, text, headers in world.ask(world.globex.api_key, requests(OPENS, name))
    )
    assert there == absent
    assert there[0] == 201


def test_what_a_tenant_has_reads_the_same_whatever_others_have(
    empty: World, tmp_path: Path
) -> None:
    asked = [
        ("GET", path.replace("{period}", "2026-02") + query_of(path), None)
        for method, _, path in (r.partition(" ") for r in sorted(ABOUT_THE_CALLER - FOR_ANY_KEY))
        if method == "GET"
    ]
    world = empty.copy(tmp_path)
    before, without = (world.ask(user.api_key, asked) for user in (world.globex, world.acme))
    fill(world)
    after, with_ = (world.ask(user.api_key, asked) for user in (world.globex, world.acme))
    world.product.close()
    assert before == after
    assert all(was != now for was, now in zip(without, with_, strict=True))


def test_methods_that_are_not_served_say_nothing_about_ids(read_world: World) -> None:
    asked = [
        (method, path, kind)
        for path in {route.partition(" ")[2] for route in NAMING}
        for method in METHODS
        for kind in [kind_of(f"POST {path}")]
        # Routes that serve GET serve HEAD.
        if f"{method.replace('HEAD', 'GET')} {path}" not in ROUTES
    ]

    def ask(subjects: dict[str, str]) -> list[Answer]:
        filled = [requests(f"{method} {path}", subjects[kind])[0] for method, path, kind in asked]
        return read_world.ask(read_world.globex.api_key, filled)

    absent = ask(ABSENT)
    assert {status for status, _, _ in absent} == {405}
    assert ask({kind: subjects[0] for kind, subjects in SUBJECTS.items()}) == absent


def test_without_a_good_key_every_route_gives_one_answer(world: World) -> None:
    asked = [
        request
        for route in [*TENANT, *OPERATOR]
        for request in requests(route, "pirate")[:1] + requests(route, ABSENT["name"])[:1]
    ]
    database = world.product.gateway.database
    revoked, expired = world.key(world.globex), world.key(world.globex, expires_at_ms=NOW_MS)
    key_id = revoked.split("-")[2]
    database.write_sync(
        lambda conn: revoke_key(conn, world.globex.tenant_id, key_id, now_ms=NOW_MS)
    )
    good = world.globex.api_key
    garbled = good[:-1] + ("a" if good[-1] != "a" else "b")
    missing = world.ask(None, asked)
    assert all(answer == missing[0] for answer in missing)
    of_pirate = [requests(route, "pirate")[0] for route in [*TENANT, *OPERATOR]]
    unknown = world.ask("x", of_pirate)
    assert all(answer == unknown[0] for answer in unknown)
    # The operator's routes answer by the form of a key, which its holder sees.
    of_form = world.ask(garbled, of_pirate)[-1]
    told = [unknown[0]] * len(TENANT) + [of_form] * len(OPERATOR)
    assert all(world.ask(key, of_pirate) == told for key in (revoked, expired, garbled))
    at_operators = world.ask(good, [requests(route, "pirate")[0] for route in OPERATOR])
    assert at_operators == [of_form] * len(OPERATOR)
    tenants_own = [route for route in TENANT if route not in FOR_BOTH]
    of_admin = world.ask(ADMIN_KEY, [requests(route, "pirate")[0] for route in tenants_own])
    assert all(answer == of_admin[0] for answer in of_admin)
    assert {missing[0][0], unknown[0][0], of_form[0], of_admin[0][0]} == {401}


def test_only_what_is_for_all_answers_without_a_key(read_world: World) -> None:
    asked = [request for route in sorted(FOR_ALL) for request in requests(route, None)]
    assert {status for status, _, _ in read_world.ask(None, asked)} <= {200, 503}


@pytest.mark.parametrize("scope", sorted({*SCOPE.values()}))
def test_a_key_without_the_scope_gives_one_answer_whatever_is_named(
    world: World, scope: str
) -> None:
    routes = [route for route in TENANT if route not in FOR_ANY_KEY and scope_of(route) == scope]
    asked = [
        request
        for route in routes
        for subject in ("pirate", ABSENT["name"])
        for request in requests(route, subject)
    ]
    all_others = world.key(world.acme, scopes=SCOPES - {scope})
    answers = world.ask(all_others, asked)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == 403
    just_this = world.key(world.acme, scopes=frozenset({scope}))
    assert 403 not in {status for status, _, _ in world.ask(just_this, asked)}


def test_a_suspended_tenants_keys_give_one_answer(world: World) -> None:
    world.product.gateway.database.write_sync(
        lambda conn: suspend_tenant(conn, world.acme.tenant_id, now_ms=NOW_MS)
    )
    asked = [request for route in TENANT for request in requests(route, "pirate")]
    answers = world.ask(world.acme.api_key, asked)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == 403
