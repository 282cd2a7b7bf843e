"""Forms of all pages: each calls a route of the API that exists, with fields that it takes.

A page is checked by being listed. `{name}` in its path stands for a value of `World`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from server.console import mounting
from tests.server.console.browsing import SignIn
from tests.server.console.page_forms import Field, Form, forms_of
from tests.server.console.test_adapters import make_versions
from tests.server.in_process import InProcess, User

TENANTS_PAGES = [
    "/console",
    "/console/requests",
    "/console/adapters",
    "/console/adapters/pirate",
    "/console/adapters/pirate#deleted",
    "/console/offers",
    "/console/keys",
    "/console/keys/{key_id}",
    "/console/bill",
    "/console/webhooks",
    "/console/webhooks#made",
]
OPERATORS_PAGES = [
    "/console/operator",
    "/console/operator/tenants",
    "/console/operator/tenants/{tenant}",
    "/console/operator/tenants/{tenant}#suspended",
    "/console/operator/prices",
    "/console/operator/incidents",
    "/console/operator/audit",
]

Schema = dict[str, Any]


class World(NamedTuple):
    """The things that pages are about, besides the tenant."""

    user: User
    key_id: str

    def prepare(self, page: str) -> str:
        """Make what a page shows. Returns its path."""
        path, _, state = page.partition("#")
        if path == "/console/webhooks" and state == "made":
            self.user.call("PUT", "/v1/webhook", {"url": "https://example.com/hook"})
        if path == "/console/adapters/pirate":
            make_versions(self.user, "pirate", 2)
        if state == "deleted":
            self.user.call("DELETE", "/v1/adapters/pirate")
        if state == "suspended":
            tenant, call = f"/admin/v1/tenants/{self.user.name}", self.user.product.operator.call
            assert call("PUT", f"{tenant}/budgets/monthly/hard", {"amount": "12.5"}).is_success
            assert call("POST", f"{tenant}/suspend").is_success
        if path == "/console/bill":
            self.user.call("PUT", "/v1/usage/exports/csv", {"interval": "day"})
        return path.format(key_id=self.key_id, tenant=self.user.name)


@pytest.fixture
def world(acme: User) -> World:
    made = acme.call("POST", "/v1/keys", {"name": "one", "scopes": ["inference"]}).json()
    return World(acme, made["key_id"])


@pytest.fixture(params=[*TENANTS_PAGES, *OPERATORS_PAGES])
def forms(
    request: pytest.FixtureRequest,
    product: InProcess,
    world: World,
    signed_in: SignIn,
) -> list[Form]:
    """The forms of a page."""
    user = product.operator if request.param in OPERATORS_PAGES else world.user
    answer = signed_in(user).get(world.prepare(request.param))
    assert answer.status_code == 200, answer.text
    return forms_of(answer.text)


@pytest.fixture
def document(product: InProcess) -> Schema:
    return product.operator.call("GET", "/openapi.json").json()


def operation_of(document: Schema, form: Form) -> Schema:
    """The operation that a form calls. Fails if there is none."""
    path = form.path.partition("?")[0]
    for template, methods in document["paths"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", template)
        if re.fullmatch(pattern, path) and form.attributes["data-method"].lower() in methods:
            return methods[form.attributes["data-method"].lower()]
    raise AssertionError(f"There is no {form}.")


def objects(document: Schema, schema: Schema) -> Iterator[Schema]:
    """The schemas that a value may fit, without references and alternatives."""
    if "$ref" in schema:
        found = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        yield from objects(document, found)
    elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
        for each in alternatives:
            yield from objects(document, each)
    else:
        yield schema


def properties_of(document: Schema, content: Schema) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for each in objects(document, content["application/json"]["schema"]):
        found |= each.get("properties", {})
    return found


def body_fields(form: Form) -> list[Field]:
    """The fields that go into the body, not into the path."""
    named = (field for field in form.fields if field.name)
    return [field for field in named if f"{{{field.name}}}" not in form.path]


def check_field(document: Schema, properties: dict[str, Schema], field: Field) -> None:
    """Check that a body may have the field, with what the form sends for it."""
    first, *inner = field.name.split(".")
    assert first in properties, f"the body has no {first}"
    found = list(objects(document, properties[first]))
    for name in inner:
        inside = [each["properties"][name] for each in found if "properties" in each]
        found = [it for each in inside for it in objects(document, each)]
    types = {each.get("type", "any") for each in found} - {"null"}
    if field.kind != "any":
        kinds = {field.kind, "number"} if field.kind == "integer" else {field.kind, "any"}
        assert kinds & types, f"{field.name} is {types}, and the form sends {field.kind}"
    if field.attributes.get("data-empty") == "null":
        assert "null" in {each.get("type") for each in found}, field.name


def test_every_form_calls_a_route_with_fields_that_it_takes(
    forms: list[Form], document: Schema
) -> None:
    for form in (it for it in forms if it.path):
        operation = operation_of(document, form)
        _, _, query = form.path.partition("?")
        parameters = {it["name"] for it in operation.get("parameters", []) if it["in"] == "query"}
        assert {part.partition("=")[0] for part in query.split("&") if part} <= parameters, form
        content = operation.get("requestBody", {}).get("content")
        fields = body_fields(form)
        assert content or not fields, f"{form} takes no body"
        for each in fields:
            check_field(document, properties_of(document, content), each)


def test_every_form_gives_what_its_route_needs(forms: list[Form], document: Schema) -> None:
    for form in (it for it in forms if it.path):
        content = operation_of(document, form).get("requestBody", {}).get("content")
        if content:
            names = {field.name.partition(".")[0] for field in body_fields(form)}
            needs = [set(it.get("required", ())) for it in objects(
                document, content["application/json"]["schema"])]  # fmt: skip
            assert any(need <= names for need in needs), f"{form} needs {needs}"
        for name in re.findall(r"\{(\w+)\}", form.path):
            assert name in {field.name for field in form.fields}, f"{form} has no field {name}"


def test_what_a_form_shows_once_is_in_the_answer(forms: list[Form], document: Schema) -> None:
    for form in (it for it in forms if "data-show" in it.attributes):
        answers = operation_of(document, form)["responses"]
        content = next(it for status, it in answers.items() if status.startswith("2"))["content"]
        assert form.attributes["data-show"] in properties_of(document, content), form


def test_what_is_to_happen_once_has_a_key_that_says_so(forms: list[Form], document: Schema) -> None:
    for form in (it for it in forms if it.path):
        parameters = operation_of(document, form).get("parameters", [])
        needs_key = any(it["name"].lower() == "idempotency-key" for it in parameters)
        assert needs_key == ("data-once" in form.attributes), form


def test_an_accessible_name_contains_what_is_visible() -> None:
    """Whoever speaks to a page says what is to be seen on it (WCAG 2.5.3)."""
    named = re.compile(r'<(?:a|button) [^<]*?aria-label="(.*?)">(.*?)</(?:a|button)>')
    templates = Path(mounting.__file__).parent / "templates"
    found = [it for path in templates.iterdir() for it in named.findall(path.read_text())]
    assert len(found) > 5
    assert [(name, seen) for name, seen in found if seen not in name] == []


def test_every_field_of_a_form_says_what_it_is(forms: list[Form]) -> None:
    for form in forms:
        unnamed = [field.name for field in form.fields if field.is_shown and not field.has_label]
        assert unnamed == [], form
