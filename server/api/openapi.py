"""The OpenAPI document: the routes' declarations, completed with their bodies and possible answers.

A route declares its path, its parameters, and the models of its body and of its answer.
Its possible errors follow from what it needs: a key, a body, an engine.
"""

import re
from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode

from registry.errors import Failed, InvalidApiKey, Limited, NoRoom, NotFound
from server.api import errors
from server.api.bodies import JsonBody
from server.api.completion_models import ChatCompletionChunk, TextCompletionChunk
from server.api.errors import answer_of
from server.api.examples import example_of
from server.api.field_docs import descriptions
from server.api.openai import ChatRequest, CompletionRequest
from server.api.tokenize_requests import ChatToTokenize, TextToTokenize, TokensToDecode
from server.billing.exports.formats import INFO
from server.inference.errors import (
    IdempotencyKeyInUse,
    IdempotencyKeyMismatch,
    engine_unavailable,
    failed,
    request_timeout,
)
from server.text.json_object import JsonObject

_REFS = "#/components/schemas/{model}"
_JSON = "application/json"

# Bodies that routes read themselves: each fits one of the models.
_BODIES: dict[str, list[type[BaseModel]]] = {
    "/v1/chat/completions": [ChatRequest],
    "/v1/completions": [CompletionRequest],
    "/tokenize": [TextToTokenize, ChatToTokenize],
    "/detokenize": [TokensToDecode],
}
# Events of streamed answers.
_EVENTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": TextCompletionChunk,
}
_PART = "/v1/uploads/{upload_id}/files/{filename}"
_EXPORTS = ("/v1/usage/export", "/admin/v1/usage/export")

# Errors of every route with a key; a 431 and some 408s are sent before there is a route.
_ALWAYS = (400, 401, 403, 404, 408, 429, 431, 500, 503)
_WITH_A_BODY = (413, 415)
_THAT_CHANGE = (409, 422)
_WITH_AN_ENGINE = (409, 413, 422, 502, 504)
_THAT_TAKE_DISK = (507,)

_ERRORS = {
    400: "The request is malformed, or has a value that is not accepted; `param` names it.",
    401: "The API key is missing or not valid.",
    403: "The key lacks the scope, or the account is suspended.",
    404: "Not found, or another tenant's: the two are not told apart.",
    408: "The request did not arrive in time.",
    409: "In conflict with the current state, or under way already.",
    413: "The body is over its limit.",
    415: "The body is compressed.",
    422: "The Idempotency-Key was used for another request.",
    429: "A limit or a budget is exceeded; see `code`, `retry-after` and `x-should-retry`.",
    431: "The headers are over their limit.",
    500: "The server has failed; the cause is not told.",
    502: "The adapter's stored files are gone, or not those that were uploaded.",
    503: "Not available at the moment; see `retry-after`.",
    504: "The request did not finish in time.",
    507: "The disk has no room for the upload; see `retry-after`.",
}
_EXAMPLES = (
    errors.unsupported_parameter("tools"),
    InvalidApiKey(),
    errors.insufficient_permissions("inference"),
    NotFound("There is no such endpoint.", code="unknown_url"),
    errors.body_timeout(),
    IdempotencyKeyInUse(),
    errors.request_too_large(4 << 20),
    errors.compressed_body(),
    IdempotencyKeyMismatch(),
    Limited("The limit of 600 requests per minute is used up.", retry_after_s=2.0),
    errors.head_too_large(),
    Failed(),
    failed("adapter_missing"),
    engine_unavailable(),
    request_timeout(120.0),
    NoRoom(),
)
"""One error of each status, as clients get it."""

_PARAMETERS = {
    "Idempotency-Key": "A key of your own: a request that is sent again with it is done once.",
    "X-Chorale-Ignore-Unknown-Fields": "With true, fields that no request has are left out, and "
    "the answer's header `x-chorale-ignored-fields` names them; by default as the tenant is set.",
    "action": "Only this action, such as `tenant.plan`.",
    "actor": "Only what was done by `operator`, `gateway`, or `key:` and the id of an API key.",
    "adapter": "The adapter's name.",
    "after": "Only what comes behind this entry: the `last_id` of the page before.",
    "alias": "The alias, such as `latest`.",
    "answer_id": "The `id` of the answer, such as `chatcmpl-...`.",
    "api_key_ids": "Only usage of these API keys, by id.",
    "base_model": "The base model's name.",
    "batch": "With true only usage of batches, of which there is none.",
    "bucket_width": "The time of each bucket.",
    "content-range": "The part's place, `bytes FIRST-LAST/TOTAL`; not needed for a whole file.",
    "end": "Unix seconds, or an ISO 8601 date or time; not included. By default now.",
    "end_time": "Unix seconds, not included. By default now.",
    "enforcement": "A hard budget refuses requests; of a soft one a webhook tells.",
    "fingerprint": "The suspect's `fingerprint`, as the list of suspects has it.",
    "engine_id": "The engine's `engine_id`, as the list of engines has it.",
    "filename": "The file's name, such as `adapter_model.safetensors`.",
    "format": "The format of the file.",
    "group_by": "What to tell apart: each of its values has sums of its own.",
    "key_id": "The API key's id, which stands between `sk-chorale-` and the secret.",
    "kind": "A monthly budget is for each month of UTC; a prepaid one is what was paid before.",
    "limit": "The most entries of the answer, or buckets of time.",
    "line_items": "Only costs of these kinds, as `line_item` of an answer has them.",
    "model": "The model's name, as requests give it.",
    "models": "Only usage of these models, by the names that requests gave.",
    "name": "The adapter's name.",
    "owner": "The name of the tenant that owns the adapter.",
    "page": "The `next_page` of the page before.",
    "period": "A month of UTC, such as 2026-11.",
    "project_ids": "Only usage of these tenants, by id.",
    "route": "The route's name.",
    "scope": "Only prices of this scope.",
    "scope_id": "Only prices of this tenant, adapter or plan: an id, of a plan the name.",
    "start": "Unix seconds, or an ISO 8601 date or time. By default the start of this UTC month.",
    "start_time": "Unix seconds.",
    "tenant": "The tenant's id or name.",
    "upload_id": "The upload's `id`.",
    "user_ids": "Only usage of these users; no usage has one, so any value leaves nothing.",
    "version": "The number of the version.",
}
"""Descriptions of parameters, where a route's docstring has none of its own."""

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "received_bytes": {
                    "type": "integer",
                    "description": "Where an upload's next part begins, after a wrong offset.",
                },
                "limiter_degraded": {
                    "const": True,
                    "description": "The limiter has lost its state, and may refuse too early.",
                },
            },
        }
    },
}


def openapi_document(app: FastAPI) -> JsonObject:
    """The document of all routes but those for machines."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document["components"].setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR_SCHEMA
    examples = {answer.status: answer.body for answer in map(answer_of, _EXAMPLES)}
    document["components"]["responses"] = {
        f"Error{status}": {
            "description": description,
            "content": {
                _JSON: {
                    "schema": {"$ref": _REFS.format(model="Error")},
                    "example": examples[status],
                }
            },
        }
        for status, description in _ERRORS.items()
    }
    for route in iter_route_contexts(app.routes):
        if isinstance(route.route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                operation = document["paths"][route.path_format][method.lower()]
                _complete(operation, route, method, schemas)
    return document


def _complete(operation: JsonObject, route: RouteContext, method: str, schemas: JsonObject) -> None:
    path = str(route.path_format)
    body = _body(route, path, schemas)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": body}
    statuses = {*_ALWAYS, *(_WITH_A_BODY if body else ())}
    if method != "GET":
        statuses |= {*_THAT_CHANGE}
    if path in _EVENTS:
        statuses |= {*_WITH_AN_ENGINE}
    if path == _PART or path.endswith("/complete"):
        statuses |= {*_THAT_TAKE_DISK}
    answers = {s: a for s, a in operation["responses"].items() if s.startswith("2")}
    for answer in answers.values():
        answer["description"] = (
            route.description.partition("\n")[0] or "The request was carried out."
        )
        answer["content"] = _contents(path, answer.get("content", {}), schemas)
    if path.endswith("/complete"):
        answers["202"] = {
            **answers["200"],
            "description": "An engine has yet to prove the adapter.",
        }
    refusals = {str(s): {"$ref": f"#/components/responses/Error{s}"} for s in sorted(statuses)}
    operation["responses"] = answers | refusals
    names = re.findall(r"{(\w+)}", path)
    operation.get("parameters", []).sort(
        key=lambda it: names.index(it["name"]) if it["in"] == "path" else len(names)
    )
    parameters = {it["name"]: it for it in operation.get("parameters", ())}
    for name, text in (_PARAMETERS | descriptions(route.description, parameters)).items():
        if name in parameters:
            parameters[name].setdefault("description", text)


def _contents(path: str, declared: JsonObject, schemas: JsonObject) -> JsonObject:
    """The content of a successful answer, by media type, with an example of its JSON."""
    if path in _EXPORTS:
        return {info.media_type: {"schema": {"type": "string"}} for info in INFO.values()}
    schema = declared[_JSON]["schema"]
    contents: JsonObject = {
        _JSON: {"schema": schema, "example": example_of(schema, schemas, f"answer of {path}")}
    }
    if path in _EVENTS:
        contents["text/event-stream"] = {"itemSchema": _event(_EVENTS[path], schemas)}
    return contents


def _event(model: type[BaseModel], schemas: JsonObject) -> JsonObject:
    """A server-sent event: a part of an answer as the model has it, an error, or the end."""
    error = {"$ref": _REFS.format(model="Error")}
    part = {
        "type": "string",
        "description": "JSON of a part of the answer, or of an error, which ends the stream.",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [_reference(model, schemas, "serialization"), error]},
    }
    end = {"const": "[DONE]", "description": "The end of a complete stream."}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [part, end]}},
    }


def _body(route: RouteContext, path: str, schemas: JsonObject) -> JsonObject | None:
    """The content of a request, by media type; None for a route that reads no body."""
    if path == _PART:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    models = [
        part.call.model for part in _parts(route.dependant) if isinstance(part.call, JsonBody)
    ]
    references = [
        _reference(model, schemas, "validation") for model in models or _BODIES.get(path, [])
    ]
    if not references:
        return None
    return {_JSON: {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}


def _reference(model: type[BaseModel], schemas: JsonObject, mode: JsonSchemaMode) -> JsonObject:
    """A reference to the model's schema, which is added to the schemas with all that it names."""
    schema = model.model_json_schema(ref_template=_REFS, mode=mode)
    for name, definition in schema.pop("$defs", {}).items():
        assert schemas.setdefault(name, definition) == definition, f"two schemas called {name}"
    name = model.__name__.strip("_")
    name = name if schemas.get(name, schema) == schema else f"{model.__module__}.{name}"
    schemas[name] = schema
    return {"$ref": _REFS.format(model=name)}


def _parts(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for part in dependant.dependencies:
        yield from _parts(part)
