"""JSON schemas: checked keyword by keyword, and reduced to the keywords that are enforced.

llguidance ignores a keyword that it does not know, so none reaches it. The order of properties is
kept, since answers have it.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Context, Decimal
from typing import Any
from urllib.parse import quote, unquote

from registry.errors import Invalid
from server.constraints.pattern import rust_pattern

MAX_DEPTH = 32
MAX_LEVELS = 500
"""Levels of the root and of every schema that is referred to, in all: llguidance recurses through
references, and 3,000 levels overflow a thread's stack of 8 MiB, which ends the process.
"""
MAX_COUNTS = {"properties": 1_000, "enum values": 1_000, "branches": 500, "patterns": 50}
MAX_MULTIPLE = 10_000
"""Most that the digits of all different `multipleOf` may give if they are multiplied: llguidance
makes as many states, 0.04 s for 10,000. Likewise it compares all patterns of properties in pairs.
"""
MAX_NUMBER = 2**53
"""llguidance computes with floats, which are exact up to here only."""
DIGITS = Context(prec=15, Emin=-8)
"""Fractions of 15 digits and 22 places at most; llguidance may read others as their neighbours."""
MAPS = ("$defs", "definitions", "properties", "patternProperties")
LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
SINGLE = ("items", "additionalProperties")
"""Keywords whose values are schemas: by name, in a list, or one."""
MAX_LEFT_OUT = 64
"""Parts of a schema that may be left out because nothing enforces them; else it is refused."""
Place = tuple[str | int, ...]
"""Keys and indexes from a schema's root."""

_APPLIES_TO_THE_REST = {
    "properties": "additionalProperties", "patternProperties": "additionalProperties",
    "prefixItems": "items",
}  # fmt: skip
"""Keywords, and the one that applies to all values that they do not speak of."""

_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
_ANNOTATIONS = frozenset({
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "discriminator", "externalDocs", "xml",
    "contentEncoding", "contentMediaType", "contentSchema",
})  # fmt: skip
"""Keywords that demand nothing by JSON Schema or OpenAPI, as all do that begin with `x-`."""
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
_UNENFORCED_FORMATS = frozenset({
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""The other formats that JSON Schema defines; all further ones only annotate, such as int32."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]|(?<![\[^-])\\(?:u00|x)[01]")
"""Characters that no answer has: see _ESCAPES in `grammar`. An expression may write
them, too, but as ends of a range they are harmless.
"""


_GROUPS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("type", lambda v: v != [] and set(map(str, v if isinstance(v, list) else [v])) <= _TYPES,
     f"one or several of {', '.join(sorted(_TYPES))}"),
    ("const", lambda _: True, "any value"),
    ("$ref", lambda v: isinstance(v, str) and v[:2] in ("#", "#/"), "a place in it: #/..."),
    ("pattern", lambda v: isinstance(v, str), "a string"),
    ("format", lambda v: isinstance(v, str) and v in _FORMATS,
     f"one that is enforced, {', '.join(sorted(_FORMATS))}"),
    ("nullable", lambda v: type(v) is bool, "true or false"),
    ("minItems maxItems minLength maxLength maxProperties",
     lambda v: type(v) is int and v >= 0, "a whole number of 0 or more"),
    ("minProperties", lambda v: type(v) is int and v in (0, 1),
     "0 or 1, as answers might have the same property twice; use required"),
    ("minimum maximum exclusiveMinimum exclusiveMaximum",
     lambda v: type(v) in (int, float), "a number"),
    ("multipleOf", lambda v: type(v) in (int, float) and v > 0, "a number above 0"),
    ("required", lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
     "a list of names"),
    (" ".join(("enum", *LISTS)), lambda v: isinstance(v, list) and v != [], "a list of 1 or more"),
    (" ".join(MAPS), lambda v: isinstance(v, dict), "an object of schemas"),
    (" ".join(SINGLE), lambda v: isinstance(v, dict | bool), "a schema; a list is prefixItems"),
)  # fmt: skip
_KINDS = {name: (fits, words) for names, fits, words in _GROUPS for name in names.split()}
_COUNTED = {
    "enum": "enum values", "required": "properties", **dict.fromkeys(MAPS, "properties"),
    **dict.fromkeys(LISTS, "branches"), "patternProperties": "patterns",
}  # fmt: skip


def path_of(param: str, place: Place) -> str:
    """A place as clients are told of it, as in `schema.properties.age["a b"].anyOf[1]`."""
    for step in place:
        if isinstance(step, str) and re.fullmatch(r"[A-Za-z_$][\w$]{0,63}", step, re.ASCII):
            param += f".{step}"
        else:
            param += f"[{json.dumps(step[:64] if isinstance(step, str) else step)}]"
    return param


def normalised(schema: Any, param: str, left_out: list[str] | None = None) -> dict[str, Any]:
    """The schema with the keywords that demand something. Raises Invalid with the path at fault.

    left_out: gets the paths of keywords at fault, which are then left out where that is possible:
    the schema that is left demands less, and nothing more. None to have none left out.
    """
    walk = _Walk(param, left_out)
    kept = walk.kept(schema, (), 0)
    walk.check_refs()
    if walk.num_levels > MAX_LEVELS:
        raise walk.fault((), f"what is referred to may have {MAX_LEVELS} levels in all at most")
    walk.check_loops()
    walk.ease_unions()
    if kept is False:
        raise walk.fault((), "no answer fits the schema false")
    return {} if kept is True else kept


class _Walk:
    """A walk through a schema.   places: depth of each subschema.   refs: places and targets."""

    def __init__(self, param: str, left_out: list[str] | None) -> None:
        self._param = param
        self._left_out = left_out
        self._counts: Counter[str] = Counter()
        self.places: dict[Place, int] = {}
        self._kept: dict[Place, dict[str, Any]] = {}
        self.refs: list[tuple[Place, Place]] = []
        self._multiples: set[int] = set()

    @property
    def num_levels(self) -> int:
        """The most levels that references can put below one another."""
        levels = Counter({target: 0 for _, target in self.refs} | {(): 0})
        for place, depth in self.places.items():
            for above in (place[:end] for end in range(len(place) + 1)):
                if above in levels:
                    levels[above] = max(levels[above], 1 + depth - self.places[above])
        return levels.total()

    def fault(self, place: Place, why: str, code: str | None = None) -> Invalid:
        path = path_of(self._param, place)
        return Invalid(f"{path}: {why}.", param=path, code=code)

    def note(self, fault: Invalid) -> None:
        """Note that something is left out for its fault. Raises the fault if nothing may be."""
        if self._left_out is None or len(self._left_out) == MAX_LEFT_OUT:
            raise fault
        self._left_out.append(str(fault.param))

    def check_refs(self) -> None:
        for place, target in self.refs:
            # A reference to data, such as an example, would lead to a schema that was not checked.
            if target not in self.places or "patternProperties" in target:
                why = "there is no schema at this place that may be referred to"
                self.note(self.fault(place, why))
                del self._kept[tuple(map(str, place[:-1]))]["$ref"]

    def check_loops(self) -> None:
        """Find references that lead to each other and to nothing that a value could be."""
        refs = [(place, _referring(place), target) for place, target in self.refs]
        endless = {target for _, _, target in refs}
        while others := endless - {of for _, of, target in refs if target in endless}:
            endless -= others
        for place, of, target in refs:
            if of in endless and target in endless:
                self.note(self.fault(place, "this reference leads back to itself, without an end"))
                self._kept[tuple(map(str, place[:-1]))].pop("$ref", None)

    def kept(self, schema: Any, place: Place, depth: int) -> Any:
        self.places[tuple(map(str, place))] = depth
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.note(self.fault(place, "a schema is an object, true or false"))
            return True
        if depth > MAX_DEPTH:
            self.note(self.fault(place, f"schemas may be nested {MAX_DEPTH} deep at most"))
            return True
        kept = self._kept[tuple(map(str, place))] = {}
        faulty = []
        for keyword, value in schema.items():
            if not _demands_nothing(keyword, value, is_root=not place):
                try:
                    kept[keyword] = self._value(keyword, value, (*place, keyword), depth + 1)
                except Invalid as fault:
                    self.note(fault)
                    faulty.append(keyword)
        if place and any(isinstance(schema.get(name), str) for name in ("$id", "id")):
            return True  # references in it lead to other places than they would without
        for keyword in faulty:
            for (rest,) in relax(kept, (keyword,))[1:]:
                self.note(self.fault((*place, rest), f"{keyword} is not enforced"))
        if kept.pop("nullable", False) and "type" in kept:
            # OpenAPI 3.0 has it so: beside no type it changes nothing.
            types = kept["type"] if isinstance(kept["type"], list) else [kept["type"]]
            kept["type"] = list(dict.fromkeys([*types, "null"]))
        return kept

    def ease_unions(self) -> None:
        """Make anyOf of each oneOf whose branches refer to objects that one property tells apart.

        Pydantic writes unions with a discriminator so, and llguidance looks behind no reference.
        """
        refs: dict[Place, Place] = {tuple(map(str, at)): target for at, target in self.refs}
        for place, schema in self._kept.items():
            branches = [(*place, "oneOf", str(i)) for i in range(len(schema.get("oneOf", ())))]
            if branches and "anyOf" not in schema:
                lone = [branch for branch in branches if len(self._kept.get(branch, ())) == 1]
                targets = {refs[at] for branch in lone if (at := (*branch, "$ref")) in refs}
                objects = [self._kept.get(target) for target in targets]
                if len(objects) == len(branches) and _are_told_apart(objects):
                    schema["anyOf"] = schema.pop("oneOf")

    def _value(self, keyword: str, value: Any, place: Place, depth: int) -> Any:
        if keyword not in _KINDS:
            why = "this keyword is not supported, since it could not be enforced"
            raise self.fault(place, why, "unsupported_parameter")
        fits, words = _KINDS[keyword]
        if not fits(value):
            raise self.fault(place, f"it must be {words}")
        if what := _COUNTED.get(keyword):
            if self._counts[what] + len(value) > MAX_COUNTS[what]:
                raise self.fault(place, f"there may be {MAX_COUNTS[what]} {what} in all at most")
            self._counts[what] += len(value)
        if keyword == "multipleOf":
            digits = Decimal(str(value)).normalize().as_tuple().digits
            multiples = self._multiples | {int("".join(map(str, digits)))}
            if math.prod(multiples) > MAX_MULTIPLE:
                raise self.fault(place, f"multiples have a limit of {MAX_MULTIPLE} in all")
            self._multiples = multiples
        names = value if keyword in MAPS else () if keyword in (*LISTS, *SINGLE) else [value]
        if any(isinstance(leaf, str) and _CONTROL.search(leaf) for leaf in _leaves(list(names))):
            raise self.fault(
                place, "control characters but \\n, \\r, \\t, \\b, \\f are not supported"
            )
        if keyword in ("pattern", "patternProperties"):
            try:
                if len({rust_pattern(name) for name in names}) < len(names):
                    raise self.fault(place, "two patterns mean the same; leave one out")
            except ValueError as error:
                raise self.fault(place, str(error)) from None
        if keyword in MAPS:
            return {name: self.kept(inner, (*place, name), depth) for name, inner in value.items()}
        if keyword in LISTS:
            return [self.kept(inner, (*place, i), depth) for i, inner in enumerate(value)]
        if keyword in SINGLE:
            return self.kept(value, place, depth)
        if keyword == "$ref":
            # Written anew, so that llguidance cannot read it in another way.
            names = [unquote(name) for name in value.split("/")[1:]]
            self.refs.append((place, tuple(n.replace("~1", "/").replace("~0", "~") for n in names)))
            return "/".join(["#", *map(quote, names)])
        numbers = [leaf for leaf in _leaves(value) if isinstance(leaf, int | float)]
        if any(abs(number) > MAX_NUMBER for number in numbers):
            raise self.fault(place, "numbers beyond 2^53 are not supported")
        fractions = [str(number) for number in numbers if isinstance(number, float)]
        if any(DIGITS.create_decimal(text) != Decimal(text) for text in fractions):
            raise self.fault(place, "fractions of more than 15 digits are not supported")
        return value


def _referring(place: Place) -> Place:
    """The schema that a reference at a place is a demand of, itself or within its allOf."""
    of = place[:-1]
    while of[-2:-1] == ("allOf",) and isinstance(of[-1], int):
        of = of[:-2]
    return tuple(map(str, of))


def relax(schema: dict[str, Any], place: Place) -> list[Place]:
    """Leave out the part at a place; the places that demand less, then. None demands more."""
    *path, last = place
    holder: Any = schema
    is_schema = True
    for step in path:
        holder, is_schema = holder[step], not is_schema or step in SINGLE
    if not is_schema:
        holder[last] = True
        return [place]
    value = holder.pop(last, None)
    if last == "oneOf" and value and "anyOf" not in holder:
        holder["anyOf"] = value
    rest = _APPLIES_TO_THE_REST.get(str(last), "")
    if rest not in holder:
        return [place]
    holder[rest] = True
    return [place, (*path, rest)]


def _are_told_apart(schemas: list[dict[str, Any] | None]) -> bool:
    """Whether all are of objects and require a property, which has texts of its own in each."""
    objects = [schema for schema in schemas if schema and schema.get("type") == "object"]
    for name in objects[0].get("properties", {}) if len(objects) == len(schemas) else ():
        tags = [_tags(schema, name) for schema in objects]
        if all(tags) and len(set().union(*tags)) == sum(map(len, tags)):
            return True
    return False


def _tags(schema: dict[str, Any], name: str) -> set[str]:
    """Texts that a required property is one of; empty if it may be missing or anything else."""
    value = schema.get("properties", {}).get(name)
    if not isinstance(value, dict):
        return set()
    texts = [value["const"]] if "const" in value else value.get("enum", [])
    is_bound = all(isinstance(text, str) for text in texts) and name in schema.get("required", ())
    return set(texts) if is_bound else set()


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the numbers and texts in a value, names among them."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if not isinstance(value, list):
        yield value
        return
    for inner in value:
        yield from _leaves(inner)


def _demands_nothing(keyword: str, value: Any, *, is_root: bool) -> bool:
    if keyword in _ANNOTATIONS or keyword[:2] == "x-" or (value is None and keyword != "const"):
        return True
    match keyword:
        case "$schema":
            return is_root and isinstance(value, str) and _DIALECT.fullmatch(value) is not None
        case "$id":
            return is_root
        case "format":
            return isinstance(value, str) and value not in _FORMATS | _UNENFORCED_FORMATS
        case "propertyNames":
            return value is True or (
                isinstance(value, dict)
                and all(
                    _demands_nothing(name, of_it, is_root=False)
                    or (name == "type" and of_it in ("string", ["string"]))
                    for name, of_it in value.items()
                )
            )
        case "uniqueItems" | "nullable" | "exclusiveMinimum" | "exclusiveMaximum":
            return value is False
    return False
