"""Descriptions of fields, as docstrings have them."""

import pytest
from pydantic import BaseModel, ConfigDict

from server.api.field_docs import describe_fields, descriptions

FIELDS = ("size", "name", "other_name", "note")
CASES = {
    "name: what it is.": {"name": "What it is."},
    "A thing. name: what it is.   size: in bytes; note: none.": {
        "name": "What it is.", "size": "In bytes; note: none.",
    },
    "A thing.\n\n    name, other_name: one of\n    two lines.\n    size: `a` or\n        b.": {
        "name": "One of two lines.", "other_name": "One of two lines.", "size": "`a` or b.",
    },
    "A thing.\n\n    name: here.\n\n    Not of it. unknown: no field.": {"name": "Here."},
    "A thing whose\n    size: matters, so that name: is no entry.": {
        "size": "Matters, so that name: is no entry.",
    },
    "A thing.": {},
}  # fmt: skip


@pytest.mark.parametrize("docstring", CASES)
def test_a_docstring_describes(docstring: str) -> None:
    assert descriptions(docstring, FIELDS) == CASES[docstring]


class Base(BaseModel):
    """A base. name: of the base.   size: in bytes."""

    model_config = ConfigDict(json_schema_extra=describe_fields)
    name: str
    size: int


class Child(Base):
    """A child. name: of the child."""


def test_a_model_has_the_descriptions_of_its_bases_and_its_own_before_them() -> None:
    fields = Child.model_json_schema()["properties"]
    assert {name: field["description"] for name, field in fields.items()} == {
        "name": "Of the child.", "size": "In bytes.",
    }  # fmt: skip
