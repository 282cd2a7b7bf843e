"""The shape of answers as requests ask for it: OpenAI's response_format, vLLM's structured_outputs.

vLLM's options that are not served are refused, unless they are null or false.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.api import errors
from server.api.request_objects import RequestObject
from server.shapes.shape import MAX_BYTES, Shape

_MAX_CHOICES = 1_000
_ANY_OBJECT = '{"type": "object"}'
_Schema = Annotated[dict[str, Any], Field(max_length=MAX_BYTES["json"])]
_SchemaText = Annotated[str, Field(max_length=MAX_BYTES["json"])]
_Choice = Annotated[str, Field(min_length=1, max_length=MAX_BYTES["choice"])]


class _NamedSchema(RequestObject):
    name: str = Field(max_length=64, pattern="^[A-Za-z0-9_-]+$")
    description: str | None = Field(None, max_length=MAX_BYTES["json"])
    asked: _Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestObject):
    """OpenAI's field; `strict` changes nothing, since a schema is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None


class StructuredOutputs(RequestObject):
    """vLLM's field."""

    exact: ClassVar[frozenset[str]] = frozenset({"json", "choice"})
    asked: _Schema | _SchemaText | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = Field(None, min_length=1, max_length=MAX_BYTES["regex"])
    choice: list[_Choice] | None = Field(None, min_length=1, max_length=_MAX_CHOICES)
    grammar: str | None = Field(None, min_length=1, max_length=MAX_BYTES["lark"])


def shape_of(form: ResponseFormat | None, options: StructuredOutputs | None) -> Shape | None:
    """The one shape that a request asks for, or None. Raises ApiError, Invalid."""
    asked = [*_shapes_of_form(form), *_shapes_of_options(options)]
    if len(asked) > 1:
        param = asked[-1].param
        message = f"{param}: answers can have one shape; {asked[0].param} asks for another."
        raise errors.invalid_request(message, param=param)
    return asked[0] if asked else None


def _shapes_of_form(form: ResponseFormat | None) -> Iterator[Shape]:
    if form is None or form.type == "text":
        return
    if (form.type == "json_schema") != (form.json_schema is not None):
        param = "response_format.json_schema"
        message = f"{param}: the type json_schema needs it, and no other type takes it."
        raise errors.invalid_request(message, param=param)
    if form.json_schema is None:
        yield Shape("json", _ANY_OBJECT, "response_format")
    else:
        yield Shape("json", _text(form.json_schema.asked), "response_format.json_schema.schema")


def _shapes_of_options(options: StructuredOutputs | None) -> Iterator[Shape]:
    if options is None:
        return
    if (schema := options.asked) is not None:
        text = schema if isinstance(schema, str) else _text(schema)
        yield Shape("json", text, "structured_outputs.json")
    if options.json_object:
        yield Shape("json", _ANY_OBJECT, "structured_outputs.json_object")
    if options.regex is not None:
        yield Shape("regex", options.regex, "structured_outputs.regex")
    if options.choice is not None:
        yield Shape("choice", _text(options.choice), "structured_outputs.choice")
    if options.grammar is not None:
        yield Shape("lark", options.grammar, "structured_outputs.grammar")


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
