"""The OpenAPI document is complete: bodies are bounded, all statuses and types declared."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.accounts.auth import SCOPES
from server.api.completion_models import (
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    TextCompletionChunk,
)
from tests.server.in_process import ADMIN_KEY, InProcess, product_of_file
from tests.server.scripted_product import events, scripted_product

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]

product = product_of_file


@pytest.fixture(scope="module")
def document(product: InProcess) -> dict[str, Any]:
    return product.operator.call("GET", "/openapi.json").json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_the_document_is_made_beside_the_loop_that_answers(
    product: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by: list[int] = []

    def make() -> dict[str, Any]:
        made_by.append(threading.get_ident())
        return {"openapi": "3.1.0"}

    monkeypatch.setattr(product.app, "openapi", make)
    assert product.operator.call("GET", "/openapi.json").json() == {"openapi": "3.1.0"}
    assert made_by
    assert threading.get_ident() not in made_by


def test_every_operation_says_its_key_its_answer_and_its_errors(document: dict[str, Any]) -> None:
    found = dict(operations(document))
    assert len(found) > 60
    for name, operation in found.items():
        if name != "GET /v1/receipts/keys":
            assert operation["security"] == [{"HTTPBearer": []}], name
        statuses = operation["responses"].keys()
        assert statuses >= {"400", "401", "403", "404", "429", "500", "503"}, name
        assert any(status.startswith("2") for status in statuses), name
        assert all(answer.get("description") or "$ref" in answer
                   for answer in operation["responses"].values()), name  # fmt: skip


def test_no_schema_is_named_after_a_file_of_the_program(document: dict[str, Any]) -> None:
    assert [name for name in document["components"]["schemas"] if "." in name] == []


def test_every_json_answer_has_a_model_and_an_example_that_fits_it(
    document: dict[str, Any],
) -> None:
    num_answers = 0
    for name, operation in operations(document):
        for status, answer in operation["responses"].items():
            content = answer.get("content", {}).get("application/json")
            if status.startswith("2") and content:
                assert content["schema"].keys() & {"$ref", "anyOf", "oneOf"}, name
                schema = content["schema"] | {"components": document["components"]}
                jsonschema.validate(content["example"], schema)
                num_answers += 1
    assert num_answers > 80


def test_every_error_has_an_example_that_fits_its_schema(document: dict[str, Any]) -> None:
    schema = document["components"]["schemas"]["Error"]
    for name, response in document["components"]["responses"].items():
        example = response["content"]["application/json"]["example"]
        jsonschema.validate(example, schema)
        assert example["error"]["message"], name
    assert {name.removeprefix("Error") for name in document["components"]["responses"]} == {
        status
        for _, operation in operations(document)
        for status in operation["responses"]
        if not status.startswith("2")
    }


def unbounded(document: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    """Places where a string, a list or an object with free keys has no limit."""
    if schema is True:  # any JSON, as a tenant's schema has; `Shape` limits its bytes
        return
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from unbounded(document, document["components"]["schemas"][name], f"{at}:{name}")
    for kind in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(kind, ()):
            yield from unbounded(document, each, at)
    match schema.get("type"):
        case "string" if not schema.keys() & {"maxLength", "enum", "const", "pattern"}:
            yield at
        case "array":
            if "maxItems" not in schema:
                yield at
            yield from unbounded(document, schema.get("items", {}), f"{at}[]")
        case "object":
            if "additionalProperties" in schema and schema["additionalProperties"]:
                if "maxProperties" not in schema:
                    yield f"{at}{{}}"
                yield from unbounded(document, schema["additionalProperties"], f"{at}{{}}")
            elif "properties" not in schema and "maxProperties" not in schema:
                yield f"{at}{{}}"
            for name, each in schema.get("properties", {}).items():
                yield from unbounded(document, each, f"{at}.{name}")


def test_every_text_list_and_name_in_a_body_or_a_query_has_a_limit(
    document: dict[str, Any],
) -> None:
    found = []
    for name, operation in operations(document):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if body:
            found += list(unbounded(document, body["schema"], name))
        for parameter in operation.get("parameters", ()):
            if parameter["in"] != "path":  # the length of a path is limited as a whole
                at = f"{name}?{parameter['name']}"
                found += list(unbounded(document, parameter["schema"], at))
    assert found == []


def undescribed(document: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    """Fields without a description, anywhere in a body."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from undescribed(document, document["components"]["schemas"][name], at)
    inner = [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
    inner += [schema[kind] for kind in ("items", "additionalProperties") if kind in schema]
    for each in inner:
        if isinstance(each, dict):
            yield from undescribed(document, each, at)
    for name, each in schema.get("properties", {}).items():
        if not each.get("description"):
            yield f"{at}.{name}"
        yield from undescribed(document, each, f"{at}.{name}")


def test_every_field_and_parameter_of_a_request_has_a_description(
    document: dict[str, Any],
) -> None:
    found = []
    for name, operation in operations(document):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            found += list(undescribed(document, content["schema"], name))
        for parameter in operation.get("parameters", ()):
            if not parameter.get("description"):
                found.append(f"{name}?{parameter['name']}")
    assert found == []


def test_completions_and_their_events_fit_the_models_that_document_them(
    migrated_sqlite: Path, tmp_path: Path
) -> None:
    """Answers are made as dicts, so nothing else holds the models to what is sent."""
    with scripted_product(migrated_sqlite, tmp_path) as product:
        asked: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True}
        for fields in ({}, asked | {"logprobs": True, "top_logprobs": 2}):
            ChatCompletion.model_validate(product.chat(**fields).json())
        for fields in ({}, asked | {"logprobs": 2, "echo": True}):
            TextCompletion.model_validate(product.text(**fields).json())
        usage = {"include_usage": True, "continuous_usage_stats": True}
        stream = {"stream": True, "return_token_ids": True, "stream_options": usage}
        for fields in ({"stream": True}, stream | {"logprobs": True, "top_logprobs": 2}):
            for event in events(product.chat(**fields)):
                ChatCompletionChunk.model_validate(event)
        for fields in ({"stream": True}, stream | {"logprobs": 2, "echo": True}):
            for event in events(product.text(**fields)):
                TextCompletionChunk.model_validate(event)


# ---- requests that the document suggests ----


async def send(product: InProcess, case: Case, key: str) -> httpx.Response:
    """Send a case without a socket; raise TimeoutError if the application hangs for 10 s."""
    asked = case.as_transport_kwargs(base_url="http://gateway")
    body = asked.get("data")
    headers = {
        name: value.encode("latin-1")
        for name, value in (asked.get("headers") or {}).items()
        if name.lower() != "authorization"
    }
    transport = httpx.ASGITransport(product.app)
    async with httpx.AsyncClient(transport=transport, timeout=None) as client, asyncio.timeout(10):
        request = client.build_request(
            asked["method"],
            asked["url"],
            params=asked.get("params"),
            headers={**headers, "authorization": f"Bearer {key}".encode()},
            json=asked.get("json"),
            content=body if isinstance(body, bytes | str) else None,
        )
        return await client.send(request)


def ask_everything(product: InProcess, num_examples: int) -> None:
    """Send seeded valid and invalid requests to every operation, with an accepted key."""
    tenant = product.user(f"asks-{num_examples}", scopes=SCOPES)
    schema = schemathesis.openapi.from_dict(product.app.openapi())
    asked = settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for found in schema.get_all_operations():
        operation = found.ok()
        key = ADMIN_KEY if operation.path.startswith("/admin/") else tenant.api_key
        answered: list[int] = []
        asked(given(case=operation.as_strategy())(asking(product, key, answered)))()
        assert answered, operation.label
        if operation.body or operation.query:  # other operations have no invalid requests
            bad = operation.as_strategy(GenerationMode.NEGATIVE)
            asked(given(case=bad)(asking(product, key, answered)))()


def asking(product: InProcess, key: str, answered: list[int]) -> Callable[[Case], None]:
    def ask(case: Case) -> None:
        response = asyncio.run(send(product, case, key))
        answered.append(response.status_code)
        case.validate_response(response, checks=CHECKS)

    return ask


def test_no_request_of_the_document_is_answered_as_it_does_not_say(product: InProcess) -> None:
    ask_everything(product, num_examples=1)


@pytest.mark.soak
def test_nor_is_any_of_many(product: InProcess) -> None:
    ask_everything(product, num_examples=60)
