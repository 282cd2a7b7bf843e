"""Every endpoint asks for a key, except those that are meant for machines."""

import re

import pytest
from starlette.testclient import TestClient

from server.accounts.admin_key import AdminKey
from server.api.app import create_app
from server.api.gateway import Gateway
from server.api.routes import machines
from server.launch.settings import Settings

OPEN = {
    "/", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/look.css", "/stream.js",
}  # fmt: skip


class _NoMetrics:
    """Metrics that count nothing; these requests never reach a gateway."""

    def __getattr__(self, name: str) -> "_NoMetrics":
        return self

    def labels(self, *values: object) -> "_NoMetrics":
        return self

    def inc(self) -> None:
        return None


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A client of an application whose gateway has only an admin key and is never started."""
    gateway = Gateway.__new__(Gateway)
    object.__setattr__(gateway, "metrics", _NoMetrics())
    object.__setattr__(gateway, "admin_key", AdminKey("the-admin-key"))
    object.__setattr__(gateway, "settings", Settings(model="none"))
    return TestClient(create_app(gateway))


# The public keys are open, since checking a bill takes no account.
KEYLESS = {("GET", "/v1/receipts/keys")}


def endpoints(client: TestClient) -> list[tuple[str, str]]:
    """(method, path) of every operation in the schema."""
    paths = client.get("/openapi.json").json()["paths"]
    found = [(m.upper(), re.sub(r"{[^}]+}", "x", p)) for p, ms in paths.items() for m in ms]
    assert len(found) > 25
    return found


def test_no_endpoint_answers_without_a_key(client: TestClient) -> None:
    assert set(endpoints(client)) > KEYLESS
    for method, path in set(endpoints(client)) - KEYLESS:
        answer = client.request(method, path, content=b"{}")
        assert answer.status_code == 401, f"{method} {path}"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_no_admin_endpoint_answers_a_key_that_is_not_the_operators(client: TestClient) -> None:
    admin = [(m, p) for m, p in endpoints(client) if p.startswith("/admin/")]
    assert len(admin) > 10
    for method, path in admin:
        headers = {"authorization": "Bearer sk-chorale-something-else"}
        answer = client.request(method, path, content=b"{}", headers=headers)
        assert answer.status_code == 401, f"{method} {path}"


def test_only_the_machines_endpoints_are_open_and_outside_the_schema(client: TestClient) -> None:
    assert {route.path for route in machines.router.routes} == OPEN
    assert not OPEN & {path for _, path in endpoints(client)}


def test_an_unknown_address_is_an_error_in_openais_shape(client: TestClient) -> None:
    answer = client.get("/v2/chat")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.put("/health").status_code == 405
