"""The constraint of answers as requests ask for it, by OpenAI's field and by vLLM's."""

import dataclasses
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from registry.errors import Invalid
from server.api.request_objects import RequestObject
from server.constraints.constraint import MAX_BYTES, WHITESPACE_PARAM, Constraint, is_whitespace

_Schema = Annotated[dict[str, Any], Field(max_length=MAX_BYTES["json"])]
_SchemaText = Annotated[str, Field(max_length=MAX_BYTES["json"])]
_Choice = Annotated[str, Field(min_length=1, max_length=MAX_BYTES["choice"])]
_ANY_OBJECT = {"type": "object"}


class _NamedSchema(RequestObject):
    """A schema with a name.   schema: the JSON schema that every answer fits."""

    exact: ClassVar[frozenset[str]] = frozenset({"schema"})
    without_effect = {
        "name": "it is for your own use",
        "description": "it is for your own use; the model does not see it",
        "strict": "a schema is always enforced",
    }
    asked: _Schema = Field(alias="schema")


class ResponseFormat(RequestObject):
    """OpenAI's field for the form of answers.

    type: `text` for any text, `json_object` for any JSON object, `json_schema` for JSON that fits.
    json_schema: the schema; only with the type `json_schema`, which needs it.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None


class StructuredOutputs(RequestObject):
    """vLLM's field for the form of answers; exactly one of the first five is given.

    json: a JSON schema, as an object or as text.   json_object: true for any JSON object.
    regex: an expression in Rust's syntax that matches the whole answer.
    choice: texts, one of which is the answer.   grammar: a grammar in Lark's syntax.
    whitespace_pattern: an expression for the whitespace between JSON's tokens, wherever there may
    be some; also for the JSON of `response_format`.
    """

    exact: ClassVar[frozenset[str]] = frozenset({"json", "choice"})
    not_served = dict.fromkeys(
        ("disable_additional_properties", "disable_any_whitespace", "disable_fallback"), (False,)
    )
    asked: _Schema | _SchemaText | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = Field(None, min_length=1, max_length=MAX_BYTES["regex"])
    choice: list[_Choice] | None = Field(None, min_length=1, max_length=1_000)
    grammar: str | None = Field(None, min_length=1, max_length=MAX_BYTES["lark"])
    whitespace_pattern: str | None = Field(None, min_length=1, max_length=64)


def constraint_of(
    form: ResponseFormat | None, options: StructuredOutputs | None
) -> Constraint | None:
    """The one constraint that a request asks for, or None. Raises Invalid."""
    asked: list[tuple[Literal["json", "regex", "choice", "lark"], Any, str]] = []
    if form is not None:
        param = "response_format.json_schema"
        if (form.type == "json_schema") != (form.json_schema is not None):
            message = f"{param}: the type json_schema needs it, and no other type takes it."
            raise Invalid(message, param=param)
        schema = form.json_schema.asked if form.json_schema else None
        asked.append(("json", schema, f"{param}.schema"))
        asked.append(
            ("json", _ANY_OBJECT if form.type == "json_object" else None, "response_format")
        )
    if options is not None:
        param = "structured_outputs"
        asked.append(("json", options.asked, f"{param}.json"))
        asked.append(("json", _ANY_OBJECT if options.json_object else None, f"{param}.json_object"))
        asked.append(("regex", options.regex, f"{param}.regex"))
        asked.append(("choice", options.choice, f"{param}.choice"))
        asked.append(("lark", options.grammar, f"{param}.grammar"))
    constraints = [
        Constraint(kind, it if isinstance(it, str) else json.dumps(it, ensure_ascii=False), param)
        for kind, it, param in asked
        if it is not None
    ]
    if len(constraints) > 1:
        param, other = constraints[-1].param, constraints[0].param
        message = f"{param}: answers can have one shape only; {other} asks for another."
        raise Invalid(message, param=param)
    whitespace = options.whitespace_pattern if options else None
    if whitespace is None:
        return constraints[0] if constraints else None
    if not constraints or constraints[0].kind != "json" or not is_whitespace(whitespace):
        message = (
            f"{WHITESPACE_PARAM}: only JSON takes it; it matches spaces, \\n, \\r and \\t only."
        )
        raise Invalid(message, param=WHITESPACE_PARAM)
    return dataclasses.replace(constraints[0], whitespace=whitespace)
