"""Routes are made, shown, named and deleted over HTTP, by tenants and by the operator."""

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from registry.tables import audit_log
from server.inference import routes
from server.inference.routes import Routes
from tests.registry.rows import add_version
from tests.server.in_process import InProcess, User

FALLBACK = {"strategy": "fallback", "models": [{"model": "base", "first_token_timeout_s": 5.5}]}
FILES = {
    name: {"size_bytes": 2, "sha256": "0" * 64}
    for name in ("adapter_config.json", "adapter_model.safetensors")
}


@pytest.fixture
def acme(product: InProcess) -> User:
    return product.user("acme")


def publish(user: User, name: str) -> None:
    gateway = user.product.gateway
    revision = gateway.bases.default.model.base_revision
    gateway.database.write_sync(
        lambda conn: add_version(conn, user.tenant_id, name, base_revision=revision)
    )


def put(user: User, name: str, body: dict[str, Any] = FALLBACK, prefix: str = "/v1") -> Any:
    return user.call("PUT", f"{prefix}/routes/{name}", body)


def put_operators(product: InProcess, name: str) -> None:
    assert put(product.operator, name, prefix="/admin/v1").status_code == 200


def answers(user: User, model: str) -> str | None:
    """The route by which a request for this name was answered."""
    answer = user.complete(model)
    return answer.headers.get("x-chorale-route") if answer.status_code == 200 else "error"


def test_a_route_is_made_shown_listed_changed_and_deleted(acme: User) -> None:
    made = put(acme, "cheap").json()
    member = {"model": "base", "first_token_timeout_s": 5.5}
    assert made["models"] == [member | {"weight": None, "min_mean_logprob": None}]
    assert (made["id"], made["object"], made["strategy"]) == ("cheap", "route", "fallback")
    assert acme.call("GET", "/v1/routes/cheap").json() == made
    assert acme.call("GET", "/v1/routes").json()["data"] == [made]
    assert answers(acme, "cheap") == "cheap"
    weights = {"strategy": "weights", "models": [{"model": "base", "weight": 3}]}
    changed = put(acme, "cheap", weights).json()
    assert (changed["strategy"], changed["created_at"]) == ("weights", made["created_at"])
    assert acme.call("DELETE", "/v1/routes/cheap").json()["deleted"]
    for method in ("GET", "DELETE"):
        gone = acme.call(method, "/v1/routes/cheap")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "route_not_found")
    assert answers(acme, "cheap") == "error", "a change is seen at once"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"strategy": "fallback", "models": []}, "models"),
        ({"strategy": "random", "models": [{"model": "base"}]}, "strategy"),
        ({"strategy": "weights", "models": [{"model": "base"}]}, "models.0.weight"),
        ({"strategy": "weights", "models": [{"model": "base", "weight": 0}]}, "models.0.weight"),
        ({"strategy": "fallback", "models": [{"model": "a, b"}]}, "models.0.model"),
        ({"strategy": "fallback", "models": [{"model": "cheap"}]}, "models.0.model"),
        ({"strategy": "fallback", "models": [{"model": "known"}]}, "models.0.model"),
        ({"strategy": "fallback", "models": [{"model": "base"}] * 9}, "models"),
    ],
)
def test_a_fault_of_a_definition_is_told_by_its_path(acme: User, body, param) -> None:
    put(acme, "known")
    refused = put(acme, "cheap", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert acme.call("GET", "/v1/routes/cheap").status_code == 404


def test_a_name_stands_for_one_thing_of_a_tenant(acme: User) -> None:
    publish(acme, "pirate")
    assert acme.call("POST", "/v1/adapters/coming/uploads", {"files": FILES}).status_code == 201
    for name in ("base", "pirate", "coming"):
        refused = put(acme, name)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "name_in_use"), name
    assert put(acme, "Bad name").status_code == 400
    assert put(acme, "cheap").status_code == 200
    refused = acme.call("POST", "/v1/adapters/cheap/uploads", {"files": FILES})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "name_in_use")
    acme.call("DELETE", "/v1/adapters/pirate")
    assert put(acme, "pirate").status_code == 200
    assert acme.call("POST", "/v1/adapters/pirate/restore").status_code == 409


def test_a_tenants_own_names_come_before_the_operators_routes(product, acme: User) -> None:
    for name in ("mine", "pirate", "shared"):
        put_operators(product, name)
    publish(acme, "pirate")
    put(acme, "mine", FALLBACK | {"models": [{"model": "gone"}]})
    assert answers(acme, "shared") == "shared"
    assert answers(acme, "pirate") is None, "the adapter answers"
    assert answers(acme, "mine") == "error", "its own route answers, whose model is gone"
    globex = product.user("globex")
    assert [answers(globex, name) for name in ("shared", "pirate", "mine")] == [
        "shared",
        "pirate",
        "mine",
    ]
    assert put(product.operator, "base", prefix="/admin/v1").status_code == 409


def test_models_list_the_routes_that_a_tenant_may_name(product, acme: User) -> None:
    put_operators(product, "shared")
    put(acme, "mine")
    listed = {each["id"]: each for each in acme.call("GET", "/v1/models").json()["data"]}
    assert set(listed) == {"base", "mine", "shared"}
    assert (listed["mine"]["owned_by"], listed["mine"]["parent"]) == ("acme", None)
    assert listed["shared"]["owned_by"] == "chorale"
    assert acme.call("GET", "/v1/models/mine").json() == listed["mine"]
    globex = product.user("globex")
    assert globex.call("GET", "/v1/models/mine").status_code == 404
    assert answers(globex, "mine") == "error"


def test_a_model_of_a_route_is_never_a_route(product, acme: User) -> None:
    put(acme, "outer", FALLBACK | {"models": [{"model": "inner"}]})
    put(acme, "inner")
    answer = acme.complete("outer")
    assert (answer.status_code, answer.headers["x-chorale-attempts"]) == (404, "inner;missing")


def test_an_owner_has_so_many_routes_and_no_more(acme: User, monkeypatch) -> None:
    monkeypatch.setattr(routes, "MAX_ROUTES", 3)
    for number in range(3):
        assert put(acme, f"r{number}").status_code == 200
    refused = put(acme, "more")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "max_routes")
    assert put(acme, "r0").status_code == 200, "one that exists may be changed"


def test_the_audit_log_says_who_changed_which_route(product, acme: User) -> None:
    put(acme, "cheap")
    acme.call("DELETE", "/v1/routes/cheap")
    put_operators(product, "shared")
    columns = (audit_log.c.action, audit_log.c.target, audit_log.c.detail, audit_log.c.tenant_id)
    query = sa.select(*columns).where(audit_log.c.action.startswith("route."))
    rows = product.gateway.database.read_sync(lambda conn: conn.execute(query).all())
    assert rows == [
        ("route.set", "cheap", "fallback: base", acme.tenant_id),
        ("route.remove", "cheap", "", acme.tenant_id),
        ("route.set", "shared", "fallback: base", None),
    ]


def test_another_gateway_sees_a_change_within_two_seconds(product, acme: User) -> None:
    now = [0.0]
    there = Routes(product.gateway.database, monotonic=lambda: now[0])
    other = replace(product, gateway=replace(product.gateway, routes=there), _app=None)
    user = replace(acme, product=other)
    assert answers(user, "cheap") == "error"
    put(acme, "cheap")
    assert answers(user, "cheap") == "error"
    now[0] = 2.0
    assert answers(user, "cheap") == "cheap"
