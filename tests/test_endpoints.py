"""The site's page of endpoints says what the OpenAPI document says."""

from typing import Any

import pytest

from tests.ci_scripts import load_script

endpoints = load_script("endpoints")

SCHEMAS = {
    "Wings": {
        "type": "object",
        "required": ["count"],
        "properties": {
            "count": {"type": "integer", "minimum": 1, "maximum": 6},
            "color": {"anyOf": [{"enum": ["red", "blue"]}, {"type": "null"}], "default": None},
        },
    }
}


def document(operation: dict[str, Any]) -> dict[str, Any]:
    shown = {"summary": "Give wings", "responses": {"200": {"content": {}}, "404": {}}} | operation
    return {"components": {"schemas": SCHEMAS}, "paths": {"/v1/wings": {"post": shown}}}


def test_a_body_is_shown_with_its_fields_and_their_bounds() -> None:
    schema = {"$ref": "#/components/schemas/Wings"}
    body = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    page = endpoints.endpoints_page(document(body))
    assert "### `POST /v1/wings`\n\nGive wings\n" in page
    assert "| `count` | integer (1 to 6) | required |\n" in page
    assert '| `color` | `"red"` or `"blue"` or null | `null` |\n' in page
    assert "Errors: 404.\n" in page


def test_an_answer_is_shown_by_its_example() -> None:
    content = {"application/json": {"schema": {}, "example": {"count": 2}}}
    page = endpoints.endpoints_page(document({"responses": {"201": {"content": content}}}))
    assert 'Answer: 201, `application/json`\n\n```json\n{\n  "count": 2\n}\n```\n' in page


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "maxLength": 5}, "string (at most 5 characters)"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number (above 0, at most 1)"),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
         "list (at most 3 items) of boolean"),
        ({"const": "list"}, '`"list"`'),
        ({}, "any value"),
    ],
)  # fmt: skip
def test_a_type_is_said_in_words(schema: dict[str, Any], words: str) -> None:
    parameter = {"name": "wings", "schema": schema, "required": False}
    page = endpoints.endpoints_page(document({"parameters": [parameter]}))
    assert f"| `wings` | {words} | `null` |\n" in page
