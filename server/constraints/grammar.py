"""A constraint in llguidance's form, compiled for its errors on a thread, in 0.3 to 150 ms."""

import json
import math
import re
import time
from collections import Counter
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from pydantic_core import from_json

from engine.grammar.limits import COMPILE_BUDGET_S, MAX_GRAMMAR_BYTES, parser_limits
from registry.errors import Invalid
from server.constraints.constraint import WHITESPACE_PARAM, Constraint
from server.constraints.pattern import BESIDE_FORMAT, rust_pattern
from server.constraints.schema import (
    DIGITS,
    LISTS,
    MAPS,
    MAX_LEVELS,
    SINGLE,
    normalised,
    path_of,
    relax,
)
from server.constraints.schema_fault import find_fault
from server.text.json_object import JsonObject

_INDENT = 4
"""Most spaces of a level of an indented answer: models can go on with spaces without end."""
_MAX_INDENTED = 8
_FREE_LEVELS = 4
"""Levels that are indented of a value whose schema declares none of them."""
_CONTAINING = ("properties", "patternProperties", "prefixItems", *SINGLE)
_ESCAPES = 'nrbtf\\"'
"""Characters that may follow a backslash in JSON.

With `u`, llguidance took "\\u0061" for another property than "a". No answer has other control
characters than these, therefore.
"""
_MAX_INTERSECTIONS = 10
"""Each may double the time that a grammar takes: with 20 it is 2 s."""
_TOKENIZER = LLTokenizer("byte")
_OWN_WORDS = {
    "NoExtensionBias": "it refers to itself without end, or no answer fits",
    "Unable to determine": "its patterns together are too much work to check; use fewer",
    "oneOf constraints": "an answer might fit several branches of oneOf; use anyOf",
    "parser error: Too many": "it is too much work to follow; make it simpler",
}
"""Sentences for errors that speak of llguidance's own settings, by their beginnings."""
_LARK = re.compile(
    r"""(?: "(?:\\.|[^"\\])*" | /(?:\\.|[^/\\])+/ | (?:\#|//)[^\n]* )
      | [:(\[&] | (%(?:json|llguidance|lark) | [<@]
        | (?<![\w-])(?:stop|stop_capture|max_tokens|temperature)(?=[ \t]*=) )""",
    re.DOTALL | re.VERBOSE,
)
"""Strings, expressions and comments, as llguidance's lexer reads them; elsewhere, the beginnings of
rules and groups, through which llguidance recurses; and what is refused, because it is not about
the text's constraint or holds a schema that nobody checked.
"""


def compiled(constraint: Constraint) -> str:
    """The constraint in llguidance's form. Raises Invalid that names the path at fault."""
    if constraint.kind == "json":
        schema = checked_schema(_read(constraint), constraint.param)
        if constraint.whitespace:
            schema["x-guidance"]["whitespace_pattern"] = constraint.whitespace
            if flaw := flaw_of(_top_level("json_schema", schema)):
                message = f"{WHITESPACE_PARAM}: {words_for(flaw)}."
                raise Invalid(message, param=WHITESPACE_PARAM)
        return _top_level("json_schema", schema)
    if constraint.kind == "regex":
        # llguidance would drop a backslash at the end.
        if (len(constraint.text) - len(constraint.text.rstrip("\\"))) % 2:
            raise constraint.fault("it ends with a backslash")
        # With "dws", \d, \w and \s are of ASCII, as in JavaScript; else they were of Unicode.
        grammar = _top_level("lark_grammar", f"start: /{regex_to_lark(constraint.text, 'dws')}/")
    else:
        grammar = _top_level("lark_grammar", _lark_of(constraint))
    if flaw := flaw_of(grammar):
        raise constraint.fault(words_for(flaw))
    return grammar


def checked_schema(asked: Any, param: str) -> JsonObject:
    """A schema in llguidance's form. Raises Invalid that names the path at fault."""
    schema = normalised(asked, param)
    if flaw := _flaw_of_schema(schema):
        path = path_of(param, find_fault(schema, flaw, _flaw_of_schema))
        raise Invalid.at(path, words_for(flaw))
    return _with_options(schema)


def enforceable_schema(
    asked: JsonObject, param: str, search_ends: float
) -> tuple[JsonObject, list[str]]:
    """The enforceable part of an object's schema, in llguidance's form, and the paths of the rest.

    The part lets in what the schema lets in, and more. It lets any object in if too much cannot be
    enforced, or the search for it goes on beyond `search_ends` (by time.thread_time).
    """
    left_out: list[str] = []
    try:
        schema = normalised(asked, param, left_out)
        while flaw := _flaw_of_schema(schema):
            is_late = time.thread_time() > search_ends
            place = () if is_late else find_fault(schema, flaw, _flaw_of_schema)
            if place in ((), ("type",)):
                raise Invalid(words_for(flaw), param=param)
            left_out += [path_of(param, gone) for gone in relax(schema, place)]
    except Invalid:
        return _with_options({"type": "object"}), [param]
    return _with_options(schema), left_out


def _read(constraint: Constraint) -> Any:
    try:
        return from_json(constraint.text, allow_inf_nan=False)
    except ValueError:
        raise constraint.fault("it is not valid JSON") from None


def _lark_of(constraint: Constraint) -> str:
    if constraint.kind == "choice":
        choices = (json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.text))
        return "start: CHOICE\nCHOICE: " + " | ".join(choices).replace("\x7f", "\\u007f")
    counts: Counter[str] = Counter()
    for found in _LARK.finditer(constraint.text):
        counts[found[0]] += 1
        if door := found[1]:
            instead = "use structured_outputs.json" if door == "%json" else "leave it out"
            raise constraint.fault(f"{door} is not supported in a grammar; {instead}")
    if counts["&"] > _MAX_INTERSECTIONS:
        raise constraint.fault(
            f"a grammar may have the operator & {_MAX_INTERSECTIONS} times at most"
        )
    if sum(counts[sign] for sign in ":([") > MAX_LEVELS:
        raise constraint.fault(f"a grammar may have {MAX_LEVELS} rules and brackets in all at most")
    return constraint.text


def _flaw_of_schema(schema: JsonObject) -> str | None:
    return flaw_of(_top_level("json_schema", _with_options(schema)))


def _with_options(schema: JsonObject) -> JsonObject:
    num_spaces = _INDENT * min(_levels(schema), _MAX_INDENTED)
    options = {"whitespace_pattern": rf" |\n {{0,{num_spaces}}}", "json_allowed_escapes": _ESCAPES}
    return {**_written(schema), "x-guidance": options}


def _levels(schema: Any) -> int:
    """Levels of objects and lists that a schema declares, or about as many if it refers to some."""
    if not isinstance(schema, dict):
        return max(map(_levels, schema), default=0) if isinstance(schema, list) else 0
    parts = [schema[keyword] for keyword in (*LISTS, *SINGLE) if keyword in schema]
    parts += [list(schema[keyword].values()) for keyword in MAPS if keyword in schema]
    if parts:
        return _levels(parts) + (not schema.keys().isdisjoint(_CONTAINING))
    if not schema.keys().isdisjoint(("$ref", "enum", "const")):
        return 1
    types = schema.get("type", "object")
    return (
        _FREE_LEVELS
        if not {"object", "array"}.isdisjoint([types] if isinstance(types, str) else types)
        else 0
    )


def _written(schema: Any) -> Any:
    """A schema or a list of them, so written that llguidance 1.9.1 reads it right."""
    if not isinstance(schema, dict):
        return list(map(_written, schema)) if isinstance(schema, list) else schema
    written = schema | _next_limits(schema)
    if beside := BESIDE_FORMAT.get(schema.get("format", "")):
        written["allOf"] = [*schema.get("allOf", []), *beside]
    if "pattern" in written:
        written["pattern"] = rust_pattern(written["pattern"])
    for keyword in written.keys() & {*LISTS, *SINGLE}:
        written[keyword] = _written(written[keyword])
    for keyword in written.keys() & {*MAPS}:
        name_of = rust_pattern if keyword == "patternProperties" else str
        written[keyword] = {name_of(name): _written(it) for name, it in written[keyword].items()}
    return written


def _next_limits(schema: JsonObject) -> JsonObject:
    """The next numbers as limits, beside those that exclude a number: it might be let in."""
    limits = {}
    for sign, name in (1, "Minimum"), (-1, "Maximum"):
        if sign * (limit := schema.get(f"exclusive{name}", -sign)) >= 0:
            least = min(sign * limit + 1, float(DIGITS.next_plus(Decimal(str(sign * limit)))))
            least = max(least, sign * schema.get(name.lower(), -sign * math.inf))
            limits[name.lower()] = sign * least
    return limits


def _top_level(form: str, grammar: Any) -> str:
    """llguidance's own form. LLMatcher.grammar_from_lark would take a text that begins with a brace
    as this form, and so let in schemas that nobody checked.
    """
    return json.dumps({"grammars": [{form: grammar}]}, ensure_ascii=False)


def flaw_of(grammar: str) -> str | None:
    """Why a grammar is refused, in llguidance's words; None if it can be enforced."""
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        return f"it has more than {MAX_GRAMMAR_BYTES} bytes in the engine's form"
    began = time.thread_time()
    matcher = LLMatcher(_TOKENIZER, grammar, log_level=0, limits=parser_limits(grammar))
    if not matcher.get_error():
        matcher.compute_bitmask()  # some grammars are too much for the first mask only
    if time.thread_time() - began > COMPILE_BUDGET_S:
        return "it takes too long to compile; make it simpler"
    return matcher.get_error() or None


def accepts(grammar: str, text: str) -> bool:
    """Whether a whole answer may be this text."""
    matcher = LLMatcher(_TOKENIZER, grammar, log_level=0, limits=parser_limits(grammar))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def words_for(flaw: str) -> str:
    """One line of llguidance's error."""
    for beginning, words in _OWN_WORDS.items():
        if flaw.startswith(beginning):
            return words
    lines = flaw.splitlines()
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*named, *lines][0][:200].rstrip(".")
