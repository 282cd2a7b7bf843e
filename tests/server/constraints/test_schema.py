"""Every keyword of a JSON schema is enforced, without effect by its meaning, or refused by path."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import Invalid
from server.constraints import schema
from server.constraints.schema import normalised

UNKNOWN = [
    "not", "if", "then", "contains", "propertyNames", "uniqueItems", "nullable", "$anchor",
    "unevaluatedProperties", "dependentRequired", "additionalItems", "id", "x",
]  # fmt: skip

A_RECORD = {
    "$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
    "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"},
}  # fmt: skip
A_MODEL = {
    "type": "object",
    "properties": {
        "content": {"format": "binary", "title": "Content", "type": "string"},
        "secret": {"format": "password", "type": "string", "writeOnly": True},
        "place": {"format": "path", "title": "Place", "type": "string"},
        "json": {"contentMediaType": "application/json", "contentSchema": {}, "type": "string"},
    },
}


def refused(asked):
    """The path at fault."""
    with pytest.raises(Invalid) as error:
        normalised(asked, "s")
    assert str(error.value).startswith(f"{error.value.param}: ")
    return error.value.param


@pytest.mark.parametrize("keyword", UNKNOWN)
def test_a_keyword_that_is_not_enforced_is_refused_by_its_path(keyword):
    asked = {"properties": {"a b": {"items": {"anyOf": [True, {keyword: 7}]}}}}
    assert refused(asked) == f's.properties["a b"].items.anyOf[1].{keyword}'


@pytest.mark.parametrize(
    "value",
    [
        {"type": "any"}, {"type": []}, {"type": 7}, {"enum": []}, {"anyOf": []}, {"oneOf": {}},
        {"properties": []}, {"items": [{}]}, {"required": "a"}, {"minLength": -1},
        {"maxItems": 1.0}, {"minItems": True}, {"minimum": "1"}, {"exclusiveMinimum": True},
        {"multipleOf": 0}, {"pattern": 7}, {"format": 1}, {"$ref": "http://a/b"}, {"$ref": "#a"},
        {"$ref": "#/$defs/gone"}, {"const": 2**53 + 1}, {"enum": [{"a": [-1e300]}]},
        {"maximum": 2**60}, {"$schema": "http://json-schema.org/draft-03/schema#"},
        {"format": "json-pointer"}, {"propertyNames": {"minLength": 1}}, {"propertyNames": False},
        {"propertyNames": {"type": "string", "pattern": "a"}}, {"propertyNames": {"type": 7}},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_a_keyword_cannot_have_is_refused_by_its_path(value):
    assert refused(value) == f"s.{next(iter(value))}"


def test_what_demands_nothing_is_left_out_and_the_order_of_properties_is_kept():
    nothing = {
        "title": "t", "description": "d", "examples": [1], "default": None, "$comment": "c",
        "discriminator": {}, "x-guidance": {"lenient": True}, "nullable": False, "minimum": None,
        "uniqueItems": False, "not": None, "exclusiveMinimum": False, "format": "int32",
        "propertyNames": {"type": "string", "title": "t"}, "contentEncoding": "base64",
        "contentMediaType": "image/png", "contentSchema": {"not": {}}, "example": 1, "xml": {},
        "externalDocs": {"url": "u"}, "writeOnly": True, "x-order": 1,
    }  # fmt: skip
    inner = {
        "additionalProperties": False,
        "properties": {"z": {"const": None} | nothing, "a": True},
    }
    root = {"$id": "i", "$schema": "https://json-schema.org/draft/2020-12/schema"}
    kept = normalised(root | nothing | inner, "s")
    assert json.dumps(kept) == (
        '{"additionalProperties": false, "properties": {"z": {"const": null}, "a": true}}'
    )
    assert refused({"items": root}) == "s.items.$id"


@pytest.mark.parametrize(
    ("asked", "type_"),
    [("string", ["string", "null"]), (["null", "string"], ["null", "string"])],
)
def test_what_is_nullable_may_be_null_beside_a_type_only(asked, type_):
    assert normalised({"type": asked, "nullable": True}, "s") == {"type": type_}
    assert normalised({"enum": [1], "nullable": True}, "s") == {"enum": [1]}


@pytest.mark.parametrize(
    "asked", [A_RECORD, A_MODEL], ids=["zod's record", "pydantic's bytes, secret and path"]
)
def test_what_generators_write_is_taken(asked):
    assert normalised(asked, "s")


def test_a_reference_leads_to_a_schema_that_was_checked_never_to_data():
    node = {"$defs": {"a/b %": {"items": {"$ref": "#"}}}, "$ref": "#/$defs/a~1b%20%25"}
    assert normalised(node, "s")["$ref"] == "#/%24defs/a~1b%20%25"
    assert refused({"$ref": "#/examples/0", "examples": [{"nullable": True}]}) == "s.$ref"
    assert refused({"items": {"$ref": "#/const", "const": {"x": 1}}}) == "s.items.$ref"


@pytest.mark.parametrize(
    ("definition", "path"),
    [
        ({"$ref": "#/$defs/a"}, "s.$defs.a.$ref"),
        ({"allOf": [{"allOf": [{"$ref": "#/$defs/a"}]}]}, "s.$defs.a.allOf[0].allOf[0].$ref"),
        ({"$ref": "#/properties/x"}, "s.$defs.a.$ref"),
    ],
)
def test_a_reference_that_leads_to_nothing_but_itself_is_refused_or_left_out(definition, path):
    asked = {"$defs": {"a": definition}, "properties": {"x": {"$ref": "#/$defs/a"}, "y": False}}
    assert refused(asked) == path
    left_out = []
    assert normalised(asked, "s", left_out)["properties"]["y"] is False
    assert left_out[0] == path


@pytest.mark.parametrize(
    "definition",
    [
        {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]},
        {"items": {"$ref": "#/$defs/a"}},
        {"properties": {"allOf": {"items": {"$ref": "#/$defs/a"}}}},
    ],
)
def test_a_reference_to_what_is_around_it_is_taken_if_a_value_may_end(definition):
    asked = {"$defs": {"a": definition}, "$ref": "#/$defs/a"}
    assert normalised(asked, "s")["$defs"]["a"] == json.loads(
        json.dumps(definition).replace("#/$defs", "#/%24defs")
    )


def nested(depth):
    return {"items": nested(depth - 1)} if depth else {"type": "string"}


LARGEST = {
    "properties": lambda n: {"properties": {f"p{i}": True for i in range(n)}},
    "enum values": lambda n: {"enum": list(range(n))},
    "branches": lambda n: {"anyOf": [True] * n},
}


@pytest.mark.parametrize("what", LARGEST)
def test_a_schema_has_limits_that_hold_for_all_of_it(what):
    limit, make = schema.MAX_COUNTS[what], LARGEST[what]
    assert normalised(make(limit), "s")
    assert refused({"items": make(limit - 1), "$defs": {"d": make(2)}}).startswith("s.")
    assert refused(make(limit + 1)).startswith("s.")
    assert normalised(nested(schema.MAX_DEPTH), "s")
    assert refused(nested(schema.MAX_DEPTH + 1)).count("items") == schema.MAX_DEPTH + 1


schemas = st.recursive(
    st.sampled_from([True, {"type": "string"}, {"minLength": 2, "format": "email"}, {"const": 1}]),
    lambda inner: st.fixed_dictionaries(
        {"additionalProperties": st.just(False)},
        optional={
            "items": inner, "anyOf": st.lists(inner, min_size=1, max_size=2),
            "properties": st.dictionaries(st.sampled_from(["a", "not", "if"]), inner),
        },
    ),
    max_leaves=8,
)  # fmt: skip


def places(asked, path="s"):
    """Every subschema that is an object, with its path."""
    if isinstance(asked, dict):
        yield asked, path
        for name, inner in asked.get("properties", {}).items():
            yield from places(inner, f"{path}.properties.{name}")
        for i, inner in enumerate(asked.get("anyOf", [])):
            yield from places(inner, f"{path}.anyOf[{i}]")
        yield from places(asked.get("items"), f"{path}.items")


@given(schemas, st.data())
def test_an_unknown_keyword_anywhere_is_named_and_without_one_the_schema_is_kept(drawn, data):
    asked = {"items": json.loads(json.dumps(drawn))}
    assert normalised(asked, "s") == asked
    holder, path = data.draw(st.sampled_from(list(places(asked))))
    keyword = data.draw(st.sampled_from(UNKNOWN))
    holder[keyword] = 1
    assert refused(asked) == f"{path}.{keyword}"
    left_out = []
    assert normalised(asked, "s", left_out) == {"items": drawn}
    assert left_out == [f"{path}.{keyword}"]
