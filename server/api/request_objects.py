"""JSON objects that clients send: fields that ask for nothing are accepted, errors name a field."""

import functools
import json
import re
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from registry.errors import Fault, Invalid
from server.api import errors
from server.api.field_docs import describe_fields
from server.api.json_text import check_json
from server.api.patterns import said
from server.text.json_object import JsonObject

_MAX_SHOWN_CHARACTERS = 64
"""Characters that an error repeats of a name that the client chose."""
_MAX_FAULTS = 50_000
"""Faults of a request that are looked at; one of a branch of a union counts for itself."""
_INDEX = re.compile(r"\[\d+\]")

_Object = TypeVar("_Object", bound="RequestObject")


def _describe(schema: JsonObject, model: type[BaseModel]) -> None:
    """Complete a model's schema by the descriptions of its fields, and by those without effect."""
    describe_fields(schema, model)
    assert issubclass(model, RequestObject)
    for name, why in model.without_effect.items():
        schema["properties"][name] = {"description": f"Without effect: {why}."}


class RequestObject(BaseModel):
    """An object of a request. A field that is not served is refused by its path, unless the answer
    is the same without it: its value is null, or [] or {} of a name that is not known, or one of
    those that `not_served` lists, or the name stands in `without_effect`.

    not_served: fields that are known and not served, each with the values that ask for nothing.
    without_effect: fields that are accepted with any value, each with the reason why no answer
    depends on it.
    exact: fields of which {} and [] ask for something, too.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, defer_build=True, json_schema_extra=_describe
    )
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    without_effect: ClassVar[Mapping[str, str]] = {}
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
            if field.is_required() or field.get_default(call_default_factory=True):
                # false for a field whose default is 1.0 is kept: the caller meant something by it.
                return True
            takes_bool = field.default is None and bool in get_args(field.annotation)
            is_no = value is False and not takes_bool
            return not (is_no or _is_empty(value))
        if name in cls.not_served:
            return not any(_is_equal(value, each) for each in cls.not_served[name])
        return name not in cls.without_effect and not _is_empty(value)


def parse_body(
    body: bytes, kind: type[_Object], ignored: MutableSequence[str] | None = None
) -> _Object:
    """A body's object, its fields checked. Raises Invalid that names the field at fault.

    ignored: as in `parse_object`.
    """
    return parse_object(read_object(body), kind, ignored)


def read_object(body: bytes) -> JsonObject:
    """A body as a JSON object. Raises Invalid."""
    try:
        # json.loads would let half a surrogate pair through, which no answer can hold.
        values = from_json(check_json(body), allow_inf_nan=False)
    except ValueError:
        raise Invalid("The body is not valid JSON.") from None
    if not isinstance(values, dict):
        raise Invalid("The body must be a JSON object.")
    return values


def parse_object(
    values: JsonObject, kind: type[_Object], ignored: MutableSequence[str] | None = None
) -> _Object:
    """The object with its fields checked. Raises Invalid that names the field at fault.

    ignored: fields whose names no request knows are left out, and their paths without places in
    lists are added to it; None refuses them.
    """
    while True:
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            if error.error_count() > _MAX_FAULTS:
                message = f"The body has more than {_MAX_FAULTS} fields and values that are not "
                raise Invalid(f"{message}served.") from None
            faults = error.errors(include_url=False, include_input=False)
            unknown = [] if ignored is None else [each for each in faults if _is_unknown(each)]
            if not unknown or ignored is None:
                raise _fault(faults) from None
            known = set(ignored)
            paths = dict.fromkeys(_INDEX.sub("", _path(fault)) for fault in unknown)
            ignored += [path for path in paths if path not in known]
            for fault in unknown:
                _drop(values, fault["loc"])


def shown_key(name: str, key: str) -> str:
    """The path of an entry of a map whose keys the caller chooses."""
    return f"{name}[{json.dumps(key[:_MAX_SHOWN_CHARACTERS])}]"


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value == []


def _is_equal(value: Any, neutral: Any) -> bool:
    """Whether the values are equal; a bool equals only a bool, never 0 or 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _is_unknown(fault: ErrorDetails) -> bool:
    """Whether the fault is a field of a name that is not known anywhere."""
    return fault["type"] == "extra_forbidden" and fault["loc"][-1] not in _known_names()


def _drop(values: Any, place: tuple[str | int, ...]) -> None:
    """Remove the field at a fault's place; steps that name a branch of a union are no keys."""
    *way, name = place
    for step in way:
        # A client may have named a field as the branch, so that it does not do to look for a key.
        if isinstance(step, int) or step in _fields():
            values = values[step]
    values.pop(name, None)


@functools.cache
def _fields() -> dict[str, FieldInfo]:
    """A field of every name that an object of a request has."""
    return {
        field.alias or name: field for kind in _kinds() for name, field in kind.model_fields.items()
    }


@functools.cache
def _known_names() -> frozenset[str]:
    """The names of all fields that are known anywhere, served or not."""
    names = set(_fields())
    for kind in _kinds():
        names |= kind.not_served.keys() | kind.without_effect.keys()
    return frozenset(names)


def _fault(faults: Sequence[ErrorDetails]) -> Fault:
    """The error for the deepest fault: for a union, pydantic lists each branch that did not fit."""
    deepest = max(faults, key=lambda fault: len(fault["loc"]))
    path = _path(deepest)
    if deepest["type"] == "extra_forbidden":
        return errors.unsupported_parameter(path)
    return Invalid(f"{path}: {said(deepest)}", param=path)


def _path(fault: ErrorDetails) -> str:
    """The fault's place, as in `messages[1].content`."""
    fields = _fields()
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
