"""A page of the site with every endpoint: its parameters, its body and its answer's example."""

import json
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


def endpoints_page(document: Schema) -> str:
    """The page as Markdown.   document: of OpenAPI 3.1."""
    schemas = document["components"]["schemas"]
    lines = ["# Endpoints", "", _ABOUT, ""]
    for title, prefix in (("For tenants", ""), ("For operators", "/admin/v1")):
        lines += [f"## {title}", ""]
        for path, operations in sorted(document["paths"].items()):
            if path.startswith("/admin/v1") == bool(prefix):
                for method, operation in operations.items():
                    lines += _endpoint(f"{method.upper()} {path}", operation, schemas)
    return "\n".join(lines) + "\n"


_ABOUT = (
    "This page is read from the OpenAPI document, which a running server has at "
    "`GET /openapi.json`. [API](api.md) lists the endpoints with the key that each one needs; "
    "[errors by code](../tenant/errors.md) says what a refusal means."
)


def _endpoint(name: str, operation: Schema, schemas: Schema) -> Iterator[str]:
    yield from (f"### `{name}`", "", operation.get("description") or operation["summary"], "")
    parameters = [(p["name"], p["schema"], p["required"]) for p in operation.get("parameters", ())]
    yield from _fields("Parameters", parameters, schemas)
    content = operation.get("requestBody", {}).get("content", {})
    for media_type, body in content.items():
        schema = _resolved(body["schema"], schemas)
        for choice in schema.get("anyOf", [schema]):
            yield from _body(media_type, _resolved(choice, schemas), schemas)
    for status, answer in operation["responses"].items():
        if status.startswith("2"):
            yield from _answer(status, answer)
    errors = [status for status in operation["responses"] if not status.startswith("2")]
    yield from (f"Errors: {', '.join(errors)}.", "")


def _body(media_type: str, schema: Schema, schemas: Schema) -> Iterator[str]:
    required = schema.get("required", ())
    fields = schema.get("properties", {}).items()
    if fields:
        rows = [(name, field, name in required) for name, field in fields]
        yield from _fields("Body", rows, schemas)
    else:
        yield from (f"Body: `{media_type}`.", "")


def _fields(title: str, rows: list[tuple[str, Schema, bool]], schemas: Schema) -> Iterator[str]:
    if rows:
        yield from (f"| {title} | type | default |", "|---|---|---|")
        for name, schema, is_required in rows:
            default = "required" if is_required else f"`{json.dumps(schema.get('default'))}`"
            kind = _type(schema, schemas).replace("|", "\\|")
            yield f"| `{name}` | {kind} | {default} |"
        yield ""


def _answer(status: str, answer: Schema) -> Iterator[str]:
    for media_type, content in answer.get("content", {}).items():
        yield from (f"Answer: {status}, `{media_type}`", "")
        if "example" in content:
            yield from ("```json", json.dumps(content["example"], indent=2), "```", "")


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def _type(schema: Schema, schemas: Schema) -> str:
    """A type in words, with its bounds."""
    schema = _resolved(schema, schemas)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type(choice, schemas) for choice in choices)
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    match schema.get("type"):
        case "string":
            words = f"string{_range(schema, 'minLength', 'maxLength', ' characters')}"
            return f"{words} like `{schema['pattern']}`" if "pattern" in schema else words
        case "array":
            items = _type(schema.get("items", {}), schemas)
            return f"list{_range(schema, 'minItems', 'maxItems', ' items')} of {items}"
        case "object":
            return f"object{_range(schema, 'minProperties', 'maxProperties', ' keys')}"
        case kind:
            return f"{kind or 'any value'}{_range(schema, 'minimum', 'maximum', '')}"


def _range(schema: Schema, least: str, most: str, unit: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if low is not None and high is not None:
        return f" ({low} to {high}{unit})"
    bounds = {
        "at least": low,
        "above": schema.get("exclusiveMinimum"),
        "at most": high,
        "below": schema.get("exclusiveMaximum"),
    }
    words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
    return f" ({', '.join(words)}{unit})" if words else ""
