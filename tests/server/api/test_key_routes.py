"""Keys over HTTP, and the answers to arbitrary Authorization headers."""

import asyncio
import time

import httpx
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from server.accounts.auth import ADMIN, INFERENCE
from server.accounts.tables import api_keys
from tests.server.in_process import User, product_of_file

HOUR_S = 3600

product = product_of_file


def user_of(user, api_key):
    return User(user.product, user.tenant_id, user.name, api_key)


def error_of(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_a_key_lives_from_its_making_to_its_end(acme):
    expires_at = int(time.time()) + HOUR_S
    terms = {"name": "ci", "scopes": ["inference"], "max_concurrency": 2, "expires_at": expires_at}
    made = acme.call("POST", "/v1/keys", terms).json()
    user, path = user_of(acme, made.pop("api_key")), f"/v1/keys/{made['key_id']}"
    assert user.call("GET", "/v1/models").status_code == 200
    assert acme.call("GET", path).json() == made
    assert {name: made[name] for name in terms} == terms
    assert made["created_by"] == acme.api_key.split("-")[2]
    changed = acme.call("PATCH", path, {"max_concurrency": None, "name": "cd"}).json()
    assert changed == made | {"max_concurrency": None, "name": "cd"}
    rotated = acme.call("POST", f"{path}/rotate", {"overlap_s": 0}).json()
    assert rotated["replaces"] == made["key_id"]
    assert user.call("GET", "/v1/models").status_code == 401
    successor = user_of(acme, rotated["api_key"])
    assert successor.call("GET", "/v1/models").status_code == 200
    for _ in range(2):
        assert acme.call("DELETE", f"/v1/keys/{rotated['key_id']}").status_code == 200
    assert successor.call("GET", "/v1/models").status_code == 401


def test_the_operator_does_the_same_for_any_tenant(product, acme):
    keys = f"/admin/v1/tenants/{acme.name}/keys"
    made = product.operator.call("POST", keys, {"scopes": ["admin"]}).json()
    assert (made["created_by"], made["scopes"]) == (None, ["admin"])
    path = f"{keys}/{made['key_id']}"
    assert product.operator.call("PATCH", path, {"name": "x"}).json()["name"] == "x"
    rotated = product.operator.call("POST", f"{path}/rotate", {"overlap_s": 60}).json()
    page = product.operator.call("GET", f"{keys}?limit=2").json()
    assert (page["has_more"], len(page["data"])) == (True, 2)
    rest = product.operator.call("GET", f"{keys}?after={page['last_id']}").json()
    listed = {key["key_id"] for key in page["data"] + rest["data"]}
    assert listed == {acme.api_key.split("-")[2], made["key_id"], rotated["key_id"]}
    assert not any("api_key" in key for key in page["data"])


def test_the_operator_ends_a_key_with_all_that_came_of_it_and_all_of_a_tenant(product, acme):
    keys = f"/admin/v1/tenants/{acme.name}/keys"
    made = acme.call("POST", "/v1/keys", {"scopes": ["admin", "inference"]}).json()
    child = user_of(acme, made["api_key"])
    grandchild = user_of(acme, child.call("POST", "/v1/keys", {}).json()["api_key"])
    users = (acme, child, grandchild)
    assert [user.call("GET", "/v1/models").status_code for user in users] == [200, 200, 200]
    path = f"/v1/keys/{made['key_id']}"
    rotated = acme.call("POST", f"{path}/rotate", {"overlap_s": 0, "compromised": True}).json()
    assert [user.call("GET", "/v1/models").status_code for user in users] == [200, 401, 401]
    ended = acme.call("DELETE", f"/v1/keys/{rotated['key_id']}?cascade=true").json()["ended"]
    assert ended == [rotated["key_id"]]
    ended = product.operator.call("DELETE", keys).json()["ended"]
    assert ended == [acme.api_key.split("-")[2]]
    assert acme.call("GET", "/v1/models").status_code == 401


def test_a_suspended_tenants_remembered_key_is_refused_by_the_next_request(product, acme):
    assert acme.call("GET", "/v1/models").status_code == 200
    product.operator.call("POST", f"/admin/v1/tenants/{acme.name}/suspend")
    assert acme.call("GET", "/v1/models").status_code == 403
    product.operator.call("POST", f"/admin/v1/tenants/{acme.name}/resume")
    assert acme.call("GET", "/v1/models").status_code == 200


@pytest.mark.parametrize(
    "field",
    ["key_id", "tenant_id", "created_by", "replaces", "hmac", "prefix", "revoked_at", "is_admin"],
)
def test_what_a_key_is_no_client_writes(acme, field):
    own = f"/v1/keys/{acme.api_key.split('-')[2]}"
    for method, path in (("POST", "/v1/keys"), ("PATCH", own)):
        assert acme.call(method, path, {field: "x"}).status_code == 400


def test_a_tenants_admin_raises_nothing_above_itself(product):
    limited = product.user("globex", scopes={ADMIN, INFERENCE})
    own = f"/v1/keys/{limited.api_key.split('-')[2]}"
    refused = (403, "insufficient_permissions")
    for method, path in (("POST", "/v1/keys"), ("PATCH", own)):
        raised = limited.call(method, path, {"scopes": ["usage:read"]})
        assert error_of(raised) == (*refused, "scopes")
    operators = product.operator.call("POST", "/admin/v1/tenants/globex/keys", {}).json()
    assert error_of(limited.call("DELETE", f"/v1/keys/{operators['key_id']}"))[:2] == refused


@pytest.mark.parametrize(
    "body",
    [
        {"scopes": ["root"]},
        {"scopes": ["inference"] * 99},
        {"name": "a\0b"},
        {"expires_at": 1 << 70},
        {"requests_per_minute": 0},
        {"max_concurrency": 1 << 31},
        {"tokens_per_minute": 1.5},
    ],
)
def test_what_no_key_can_be_is_a_400(acme, body):
    assert acme.call("POST", "/v1/keys", body).status_code == 400


def test_an_ended_key_is_changed_and_rotated_no_more(acme):
    key_id = acme.call("POST", "/v1/keys", {}).json()["key_id"]
    acme.call("DELETE", f"/v1/keys/{key_id}")
    for method, path, body in (
        ("PATCH", f"/v1/keys/{key_id}", {"name": "x"}),
        ("POST", f"/v1/keys/{key_id}/rotate", {"overlap_s": 0}),
    ):
        assert error_of(acme.call(method, path, body)) == (409, "key_ended", "key_id")


# ---- any header ----

_KEY_LIKE = st.from_regex(rb"\Ask-chorale-[0-9A-Za-z'\";%\x00-]{0,60}\Z")
_bytes = st.binary(max_size=300).map(
    # Line ends are removed, since they end a header and no HTTP parser lets them through.
    lambda text: text.replace(b"\r", b"").replace(b"\n", b"")
)
_headers = st.one_of(
    _bytes,
    st.builds(lambda text: b"Bearer " + text, _bytes | _KEY_LIKE),
    st.just(b"Bearer " + b"a" * 60_000),
    st.just(b"Bearer ' OR 1=1; DROP TABLE api_keys --"),
)


@pytest.fixture
def asked(product):
    """Every statement that the product's database runs, with its values."""
    asked = []

    def note(_conn, _cursor, text, values, *_):
        asked.append((text, values))

    engine = product.gateway.database.engine
    sa.event.listen(engine, "before_cursor_execute", note)
    yield asked
    sa.event.remove(engine, "before_cursor_execute", note)


def test_any_header_is_a_401_and_no_statement_is_asked(product, asked):
    async def send(header):
        transport = httpx.ASGITransport(product.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return [
                await client.get(path, headers=[(b"authorization", header)])
                for path in ("/v1/models", "/admin/v1/tenants", "/v1/organization/costs")
            ]

    @given(header=_headers)
    @settings(max_examples=100, deadline=None)
    def check(header):
        for answer in asyncio.run(send(header)):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"

    check()
    assert asked == []


def test_a_well_formed_key_reaches_sql_as_a_bound_id_only(acme, asked):
    assert acme.call("GET", "/v1/models").status_code == 200
    key_id, secret = acme.api_key.split("-")[2:]
    [(text, values)] = [(t, v) for t, v in asked if api_keys.name in t]
    assert key_id in values
    assert key_id not in text
    assert secret not in repr(asked)
