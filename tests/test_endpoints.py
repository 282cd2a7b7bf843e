"""The site's page of endpoints says what the OpenAPI document says."""

from typing import Any

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
    shown = {"summary": "Give wings"} | operation
    return {"components": {"schemas": SCHEMAS}, "paths": {"/v1/wings": {"post": shown}}}


def test_an_endpoint_is_shown_with_its_fields_their_bounds_and_an_example() -> None:
    schema = {"$ref": "#/components/schemas/Wings"}
    body = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    answer = {"200": {"content": {"application/json": {"schema": {}, "example": {"count": 2}}}}}
    page = endpoints.endpoints_page(document({**body, "responses": {**answer, "404": {}}}))
    assert "### `POST /v1/wings`\n\nGive wings\n" in page
    assert "| `count` | integer (1 to 6) | required |\n" in page
    assert '| `color` | `"red"` or `"blue"` or null | `null` |\n' in page
    assert 'Answer: 200, `application/json`\n\n```json\n{\n  "count": 2\n}\n```\n' in page
    assert "Errors: 404.\n" in page
