"""Signing in and out, and what a session may and may not do."""

import re

import pytest

from server.accounts.auth import parse_key
from server.accounts.sessions import MAX_SIGN_INS, csrf_token
from tests.server.console.browsing import SignIn, Visitor
from tests.server.in_process import InProcess, User

PAGES = ["/console", "/console/requests", "/console/requests/none"]


@pytest.mark.parametrize("path", PAGES)
def test_without_a_session_a_page_leads_to_signing_in(product: InProcess, path: str) -> None:
    answer = Visitor(product).get(path)
    assert answer.status_code == 303
    assert answer.headers["location"] == f"/console/sign-in?next={path}"


def test_a_part_of_a_page_is_not_replaced_by_signing_in(product: InProcess) -> None:
    answer = Visitor(product).get("/console?by=key", **{"hx-request": "true"})
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == "/console/sign-in?next=/console%3Fby%3Dkey"


def test_a_key_is_exchanged_for_a_cookie_that_no_script_reads(
    product: InProcess, acme: User
) -> None:
    answer = Visitor(product).sign_in(acme.api_key, next="/console/requests")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/requests")
    cookie = answer.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=strict", "Max-Age=43200", "Path=/"):
        assert part in cookie
    assert acme.api_key not in cookie
    assert "Secure" not in cookie


def test_over_https_the_cookie_is_for_https_alone(product: InProcess, acme: User) -> None:
    answer = Visitor(product).post("/console/sign-in", {"key": acme.api_key}, "https://gateway")
    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "origin", ["https://elsewhere", "null", "", "http://gateway.elsewhere", "http://["]
)
def test_another_sites_form_signs_nobody_in_or_out(
    product: InProcess, acme: User, visitor: Visitor, origin: str
) -> None:
    answer = Visitor(product).post("/console/sign-in", {"key": acme.api_key}, origin)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    assert visitor.post("/console/sign-out", {}, origin).status_code == 403
    assert visitor.get("/console").status_code == 200


@pytest.mark.parametrize(
    "onward",
    [
        "https://elsewhere/console",
        "//elsewhere/console",
        "/v1/models",
        "/console\\..",
        "javascript:",
        "//[",
    ],
)
def test_signing_in_leads_nowhere_else(product: InProcess, acme: User, onward: str) -> None:
    answer = Visitor(product).sign_in(acme.api_key, next=onward)
    assert answer.headers["location"] == "/console"


@pytest.mark.parametrize("key", ["", "sk-chorale-nobodys", "x" * 5000])
def test_a_wrong_key_is_said_to_be_wrong(product: InProcess, key: str) -> None:
    visitor = Visitor(product)
    answer = visitor.sign_in(key)
    assert answer.status_code in (401, 413)
    assert 'role="alert"' in answer.text
    assert visitor.token is None


def test_a_key_that_signs_in_too_often_is_told_when_to_come_again(
    product: InProcess, acme: User
) -> None:
    answers = [Visitor(product).sign_in(acme.api_key) for _ in range(MAX_SIGN_INS + 1)]
    assert [answer.status_code for answer in answers] == [303] * MAX_SIGN_INS + [429]
    assert "This key has signed in 20 times within a minute" in answers[-1].text
    assert 0 < int(answers[-1].headers["retry-after"]) <= 60
    assert "set-cookie" not in answers[-1].headers


@pytest.mark.parametrize(
    ("scope", "home", "others"),
    [
        ("usage:read", "", {"/requests", "/keys", "/bill"}),
        ("adapters:read", "/adapters", {"/keys"}),
        ("inference", "/playground", {"/keys"}),
        ("adapters:write", "/keys", set()),
    ],
)
def test_a_key_begins_at_a_page_that_it_may_see_and_finds_the_others(
    product: InProcess, acme: User, scope: str, home: str, others: set[str]
) -> None:
    visitor, few = Visitor(product), acme.with_new_key(scopes=[scope])
    place = visitor.sign_in(few.api_key, next="/console").headers["location"]
    while "location" in (answer := visitor.get(place)).headers:
        place = answer.headers["location"]
    assert place == f"/console{home}"
    assert f'href="{place}" aria-current="page"' in answer.text
    links = answer.text.partition("<nav")[2].partition("</nav>")[0]
    assert set(re.findall(r'href="/console(.*?)"', links)) == {home, *others}
    assert "Sign out" in answer.text


def test_a_page_without_its_scope_names_the_scope(acme: User, signed_in: SignIn) -> None:
    few = acme.with_new_key(scopes=["adapters:write"])
    visitor = signed_in(few)
    statement = "/console/bill/2021-01"
    for scope, pages in {
        "usage:read": ("/console/requests", "/console/bill", statement,
                       f"{statement}/statement.json", "/console/bill/export"),
        "adapters:read": ("/console/adapters", "/console/adapters/pirate", "/console/offers"),
        "inference": ("/console/playground",),
        "admin": (f"/console/keys/{parse_key(few.api_key)}", "/console/webhooks"),
    }.items():  # fmt: skip
        for page in pages:
            answer = visitor.get(page)
            assert answer.status_code == 403, page
            assert scope in answer.text, page
            # The way to what it may see, and out.
            assert 'href="/console/keys"' in answer.text
            assert ">Back to the console<" in answer.text
            assert "Sign out" in answer.text


def test_after_signing_out_the_old_cookie_opens_nothing(visitor: Visitor) -> None:
    kept = visitor.token
    assert visitor.post("/console/sign-out", {}).headers["location"] == "/console/sign-in"
    visitor.cookies.set("chorale_session", kept)
    assert visitor.get("/console").status_code == 303


def test_the_api_takes_a_session_in_place_of_a_key_with_its_csrf_token_alone(
    visitor: Visitor,
) -> None:
    body = {"name": "by the page", "scopes": ["inference"]}
    for csrf in (None, "", csrf_token("another"), b"\xe4"):
        assert visitor.call("POST", "/v1/keys", csrf, body).status_code == 401
    made = visitor.call("POST", "/v1/keys", csrf_token(visitor.token), body)
    assert made.status_code == 201, made.text


def test_a_tenants_session_opens_nothing_of_the_operators(visitor: Visitor) -> None:
    assert visitor.call("GET", "/admin/v1/tenants", csrf_token(visitor.token)).status_code == 401


def test_the_operators_session_opens_the_operators_pages_and_api(product: InProcess) -> None:
    visitor = Visitor(product)
    assert visitor.sign_in("the-operator").headers["location"] == "/console/operator"
    assert visitor.get("/console").status_code == 303  # it is a page of tenants
    csrf = csrf_token(visitor.token)
    assert visitor.call("GET", "/admin/v1/tenants", csrf).status_code == 200
    assert visitor.call("GET", "/v1/keys", csrf).status_code == 401


def test_pages_run_no_script_and_load_nothing_of_others(visitor: Visitor) -> None:
    answer = visitor.get("/console")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    for path in set(part.split('"')[0] for part in answer.text.split('="/console/static/')[1:]):
        file = visitor.get(f"/console/static/{path}")
        assert file.status_code == 200
        assert "immutable" in file.headers["cache-control"]


@pytest.mark.parametrize("name", ["nothing.js", "..%2fspend.py", "%2e%2e"])
def test_only_the_files_of_the_folder_are_served(product: InProcess, name: str) -> None:
    assert Visitor(product).get(f"/console/static/1/{name}").status_code == 404


def test_a_file_of_another_version_is_not_kept(product: InProcess) -> None:
    answer = Visitor(product).get("/console/static/of-another-release/actions.js")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
