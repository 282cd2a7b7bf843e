"""The pages of keys and limits."""

import re

import pytest

from server.accounts.auth import ADMIN, INFERENCE
from server.accounts.keys import create_key
from tests.server.console.browsing import SignIn, Visitor
from tests.server.factories import NOW_MS
from tests.server.in_process import InProcess, User

METER = re.compile(r'<meter min="0" max="(\d+)".*? value="(\d+)"')


def id_of(user: User) -> str:
    return user.api_key.split("-")[2]


def test_a_key_without_the_scope_admin_sees_itself_alone_with_its_limits(
    acme: User, signed_in: SignIn
) -> None:
    other = acme.with_new_key(name="another")
    few = acme.with_new_key(tokens_per_minute=4321)
    page = signed_in(few).get("/console/keys").text
    assert id_of(few) in page
    assert "4,321 tokens per minute" in page
    assert id_of(other) not in page
    assert "data-path" not in page


def test_a_key_with_the_scope_admin_sees_all_keys_and_their_states(
    acme: User, signed_in: SignIn
) -> None:
    gone = acme.with_new_key()
    acme.call("DELETE", f"/v1/keys/{id_of(gone)}")
    ended = acme.call("POST", "/v1/keys", {"scopes": [INFERENCE], "expires_at": 1}).json()
    page = signed_in(acme).get("/console/keys").text
    for key_id in (id_of(acme), id_of(gone), ended["key_id"]):
        assert f'href="/console/keys/{key_id}"' in page
    assert [page.count(f">{state}</span>") for state in ("valid", "revoked", "expired")] == [1] * 3


def test_a_page_of_keys_leads_to_the_next_one(acme: User, visitor: Visitor) -> None:
    gateway = acme.product.gateway

    def write(conn: object) -> list[str]:
        make = {"pepper": gateway.pepper, "now_ms": NOW_MS + 1}
        return [create_key(conn, acme.tenant_id, "", **make)[0].key_id for _ in range(50)]

    made = gateway.database.write_sync(write)
    first = visitor.get("/console/keys").text
    newest = [*sorted(made, reverse=True), id_of(acme)]
    assert re.findall(r'href="/console/keys/(\w+)"', first) == newest[:50]
    assert f"/console/keys?after={newest[49]}" in first
    second = visitor.get(f"/console/keys?after={newest[49]}").text
    assert re.findall(r'href="/console/keys/(\w+)"', second) == newest[50:]
    assert "?after=" not in second


def test_what_is_used_of_a_limit_is_shown(acme: User, signed_in: SignIn) -> None:
    few = acme.with_new_key(requests_per_minute=7, max_concurrency=3)
    visitor = signed_in(few)
    assert METER.findall(visitor.get("/console/keys").text)[:2] == [("7", "0"), ("3", "0")]
    assert few.complete("base").status_code == 200
    page = visitor.get("/console/keys").text
    assert METER.findall(page)[0] == ("7", "1")
    assert 'hx-trigger="every 2s"' in page


def test_the_queue_is_shown_by_base_model(acme: User, signed_in: SignIn) -> None:
    page = signed_in(acme).get("/console/keys").text
    assert "<td>base</td>" in page
    assert "0 of " in page


def test_what_a_key_is_called_is_text_on_a_page(acme: User, visitor: Visitor) -> None:
    named = acme.with_new_key(name="<b>bold</b>")
    for path in ("/console/keys", f"/console/keys/{id_of(named)}"):
        page = visitor.get(path).text
        assert "&lt;b&gt;bold&lt;/b&gt;" in page
        assert "<b>" not in page


def test_the_page_of_a_key_says_its_terms(acme: User, signed_in: SignIn) -> None:
    key = acme.with_new_key(name="batch", requests_per_minute=60, expires_at=1_830_297_600)
    page = signed_in(acme).get(f"/console/keys/{id_of(key)}").text
    assert 'value="2028-01-01T00:00:00"' in page
    assert f'<a class="mono" href="/console/keys/{id_of(acme)}">' in page
    assert page.count(" checked") == 1


def test_a_key_that_has_ended_cannot_be_changed(acme: User, signed_in: SignIn) -> None:
    gone = acme.with_new_key()
    acme.call("DELETE", f"/v1/keys/{id_of(gone)}")
    page = signed_in(acme).get(f"/console/keys/{id_of(gone)}").text
    assert "revoked" in page
    assert "data-path" not in page


@pytest.mark.parametrize("path", ["/console/keys/{}", "/console/keys?after={}"])
def test_another_tenants_key_is_not_found(
    product: InProcess, acme: User, signed_in: SignIn, path: str
) -> None:
    other = product.user(f"not-{acme.name}", scopes=frozenset({ADMIN}))
    answer = signed_in(acme).get(path.format(id_of(other)))
    assert answer.status_code == 404
    assert "There is no API key" in answer.text
