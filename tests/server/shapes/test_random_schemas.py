"""Answers under schemas made at random are valid by an independent validator, jsonschema-rs."""

import json
from collections import Counter
from decimal import Decimal

import jsonschema_rs
import pytest

from server.faults import Invalid
from tests.server.shapes.random_schemas import RandomSchemas
from tests.server.shapes.test_grammar import accepts, make
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
