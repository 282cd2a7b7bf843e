"""JSON objects that clients send: fields that ask for nothing are accepted, errors name a field."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from server.api import errors
from server.api.errors import ApiError
from server.api.field_docs import describe_fields
from server.api.json_text import check_json
from server.text.json_object import JsonObject

_MAX_SHOWN_CHARACTERS = 64
"""Characters that an error repeats of a name that the client chose."""

_Object = TypeVar("_Object", bound="RequestObject")


class RequestObject(BaseModel):
    """An object of a request. Fields that are not served are refused, unless their value asks for
    nothing: null, [], false, an object of nothing else, or a value that `neutral` lists for the
    field.

    neutral: documented defaults of fields that are not served; false for a field that is not
    listed.
    labels: fields for the caller's own use, accepted with any value; nothing depends on them.
    exact: fields of which {} and [] ask for something, too.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, defer_build=True, json_schema_extra=describe_fields
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    labels: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        """Drop the fields that ask for nothing; pydantic checks the others."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if cls._asks(name, value)}

    @classmethod
    def _asks(cls, name: str, value: Any) -> bool:
        if value is None:
            return False
        if name in cls.exact:
            return value is not False
        if field := cls.model_fields.get(name):
            # false for a field whose default is 1.0 is kept: the caller meant something by it.
            is_default = not field.is_required() and not field.get_default(
                call_default_factory=True
            )
            return not (is_default and _is_empty(value))
        neutral = cls.neutral.get(name, (False,))
        if name in cls.labels or any(_is_equal(value, each) for each in neutral):
            return False
        # false asks for something if the default is true or 1; every value does without a default.
        return not neutral or not _is_empty(value) or (value is False and True in neutral)


def parse_body(body: bytes, kind: type[_Object]) -> _Object:
    """A body's object, its fields checked. Raises ApiError that names the field at fault."""
    return parse_object(read_object(body), kind)


def read_object(body: bytes) -> JsonObject:
    """A body as a JSON object. Raises ApiError."""
    try:
        # json.loads would let half a surrogate pair through, which no answer can hold.
        values = from_json(check_json(body), allow_inf_nan=False)
    except ValueError:
        raise errors.invalid_request("The body is not valid JSON.") from None
    if not isinstance(values, dict):
        raise errors.invalid_request("The body must be a JSON object.")
    return values


def parse_object(values: JsonObject, kind: type[_Object]) -> _Object:
    """The object with its fields checked. Raises ApiError that names the field at fault."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _fault(error) from None


def shown_key(name: str, key: str) -> str:
    """The path of an entry of a map whose keys the caller chooses."""
    return f"{name}[{json.dumps(key[:_MAX_SHOWN_CHARACTERS])}]"


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value is False or value == []


def _is_equal(value: Any, neutral: Any) -> bool:
    """Whether the values are equal; a bool equals only a bool, never 0 or 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _fault(error: ValidationError) -> ApiError:
    """The error for the deepest fault: for a union, pydantic lists each branch that did not fit."""
    deepest = max(error.errors(include_url=False), key=lambda fault: len(fault["loc"]))
    path = _path(deepest)
    if deepest["type"] == "extra_forbidden":
        return errors.unsupported_parameter(path)
    return errors.invalid_request(f"{path}: {deepest['msg']}", param=path)


def _path(fault: ErrorDetails) -> str:
    """The fault's place, as in `messages[1].content`."""
    fields = {
        field.alias or name: field for kind in _kinds() for name, field in kind.model_fields.items()
    }
    *_, last = fault["loc"]
    path = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif path in fields and get_origin(fields[path].annotation) is dict:
            return shown_key(path, part)
        elif part in fields or (part is last and fault["type"] == "extra_forbidden"):
            name = part[:_MAX_SHOWN_CHARACTERS]
            path += f".{name}" if path else name
        # Any other part names a branch of a union.
    return path


def _kinds() -> Iterator[type[RequestObject]]:
    """Every class of request objects."""
    found: list[type[RequestObject]] = [RequestObject]
    for kind in found:
        found += kind.__subclasses__()
        yield kind
