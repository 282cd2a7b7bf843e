"""Answers under schemas made at random are valid by an independent validator, jsonschema-rs."""

import json
from collections import Counter
from decimal import Decimal
from itertools import permutations
from math import inf

import jsonschema_rs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from registry.errors import Invalid
from server.constraints.grammar import enforceable_schema
from tests.server.constraints.random_schemas import RandomSchemas
from tests.server.constraints.test_grammar import accepts, make
from tests.soak import soak


def exactly(number):
    """A number as a decimal. One whose exponent is too large for that has no limits."""
    return Decimal(number) if len(number.lower().partition("e")[2]) < 6 else 0.5


def is_valid(validator, text):
    """Whether a text is valid. A number of up to 15 digits is read as a float, as clients do."""
    is_float = sum(map(str.isdigit, text)) <= 15 and "e" not in text.lower()
    return validator.is_valid(json.loads(text, parse_float=float if is_float else exactly))


@pytest.mark.parametrize(("seed", "schemas"), [(1, 500), *soak((2, 20_000))])
def test_an_answer_under_a_random_schema_is_valid_by_another_validator(seed, schemas):
    """A text made for a pattern that is valid to the validator is accepted as well."""
    made, counts = RandomSchemas(seed), Counter()
    for _ in range(schemas):
        schema, value = made.schema()
        try:
            validator = jsonschema_rs.validator_for(schema, validate_formats=True)
            grammar = make("json", schema)
        except (jsonschema_rs.ValidationError, Invalid):
            continue
        counts["taken"] += 1
        for text in filter(None, (made.answer(grammar) for _ in range(3))):
            counts["answers"] += 1
            assert is_valid(validator, text), (schema, text)
        if isinstance(value, str) and validator.is_valid(value):
            counts["texts"] += 1
            assert accepts(grammar, json.dumps(value, ensure_ascii=False)), (schema, value)
    assert counts["taken"] > 0.5 * schemas
    assert counts["answers"] > schemas
    assert counts["texts"] > 0.05 * schemas


LEAVES = st.sampled_from([
    True, {"type": "integer"}, {"type": "string", "minLength": 2}, {"enum": ["a", 1, None]},
    {"type": ["array", "null"], "maxItems": 1}, {"type": "object", "required": ["a"]}, {"const": 1},
])  # fmt: skip
NAMES = st.sampled_from(["a", "ab", "b"])
ODD = st.sampled_from([
    {"not": {"type": "string"}}, {"uniqueItems": True}, {"contains": {"const": 1}},
    {"propertyNames": {"maxLength": 1}}, {"pattern": "(?=a)"}, {"format": "json-pointer"},
    {"minProperties": 2}, {"maxProperties": 2}, {"maximum": 2**60}, {"id": "x"}, {"x": 1},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False}, {"properties": {"\0": True}}, {"enum": [1, 2**60]},
])  # fmt: skip


def with_more(inner):
    """Schemas with schemas in them, of which some cannot be enforced, or not together."""
    some = st.lists(inner, min_size=1, max_size=2)
    by_pattern = st.dictionaries(st.sampled_from(["^a", "b$", "(?!x)a", "."]), inner, min_size=1)
    parts = {
        "properties": st.dictionaries(NAMES, inner, max_size=3), "patternProperties": by_pattern,
        "additionalProperties": inner | st.just(False), "prefixItems": some, "items": inner,
        "oneOf": some, "anyOf": some,
    }  # fmt: skip
    chosen = st.lists(st.sampled_from(sorted(parts)), min_size=1, max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({n: parts[n] for n in names}))


def is_read_right(schema):
    """Whether llguidance 1.9.1 reads patternProperties right, as it does not beside anyOf."""
    return "patternProperties" not in schema or schema.keys().isdisjoint({"anyOf", "oneOf"})


def joined(inner):
    parts = st.lists(st.one_of(ODD, with_more(inner)), min_size=1, max_size=2)
    merged = parts.map(lambda them: {key: it for part in them for key, it in part.items()})
    return merged.filter(is_read_right)


SCHEMAS = joined(st.recursive(LEAVES, joined, max_leaves=6))
TEXTS = st.one_of(
    st.sampled_from([0, 1, 3, None, "a", "ab", "bab"]), st.just([1]), st.just([1, "a"])
)
VALUES = st.dictionaries(NAMES, TEXTS | st.fixed_dictionaries({"a": TEXTS}), max_size=3)


def all_orders(value):
    """The value with its names in each order: answers have them in the order of the schema."""
    return [dict(items) for items in permutations(value.items())]


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, st.lists(VALUES, min_size=4, max_size=4))
def test_what_is_left_of_a_schema_lets_everything_in_that_the_whole_one_lets_in(schema, values):
    schema = {**schema, "type": "object"}
    try:
        validator = jsonschema_rs.validator_for(schema)
    except jsonschema_rs.ValidationError:
        assume(False)
    kept, left_out = enforceable_schema(schema, "s", inf)
    grammar = json.dumps({"grammars": [{"json_schema": kept}]})
    for value in values:
        if validator.is_valid(value):
            texts = [json.dumps(it) for it in all_orders(value)]
            assert any(accepts(grammar, text) for text in texts), (kept, left_out, value)
