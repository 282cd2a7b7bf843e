"""Constraints as llguidance compiles them: what an answer may be, and which part is refused."""

import json
from math import inf

import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.limits import parser_limits
from registry.errors import Invalid
from server.constraints.constraint import MAX_BYTES, Constraint, is_whitespace
from server.constraints.grammar import accepts, compiled, enforceable_schema
from server.constraints.schema import MAX_DEPTH, MAX_LEFT_OUT, MAX_LEVELS

INTEGER = {"type": "integer"}


def nested(depth):
    return {"items": nested(depth - 1), "type": "array"} if depth else INTEGER


def make(kind, asked):
    return compiled(Constraint(kind, asked if isinstance(asked, str) else json.dumps(asked), "s"))


def refused(kind, asked):
    with pytest.raises(Invalid) as error:
        make(kind, asked)
    return error.value.param, str(error.value)


PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TREE = {
    "$defs": {
        "node": {"properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    },
    "properties": {"root": {"$ref": "#/$defs/node"}, "any": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("schema", "most"), [(PAIR, 4), ({"type": "array", "items": PAIR}, 8), ({}, 16), (TREE, 20)]
)
def test_whitespace_in_json_is_bounded_by_the_levels_of_the_schema(schema, most):
    grammar = make("json", {"x-guidance": {"whitespace_flexible": True}} | schema)
    opens, closes = ("[", "]") if schema.get("type") == "array" else ("{", "}")
    for space in ("", " ", "\n", "\n" + " " * most):
        assert accepts(grammar, f"{opens}{space}{closes}")
    for space in ("  ", " " * 40, "\n" + " " * (most + 1), "\n\n", "\t"):
        assert not accepts(grammar, f"{opens}{space}{closes}")


@pytest.mark.parametrize("gap", ["  ", " \n", "\n     "])
def test_two_keys_are_not_far_apart(gap):
    grammar = make("json", PAIR)
    for text in ('{"a":1,%s"b":2}', '{"a":1%s,"b":2}', '{"a":%s1,"b":2}', '{"a"%s:1,"b":2}'):
        assert accepts(grammar, text % "")
        assert not accepts(grammar, text % gap)


def test_a_model_that_loves_spaces_finishes():
    required = PAIR | {"required": ["a", "b"], "additionalProperties": False}
    arguments = json.dumps(
        {"grammars": [{"json_schema": enforceable_schema(required, "p", inf)[0]}]}
    )
    for grammar in (make("json", required), arguments):
        matcher = LLMatcher(LLTokenizer("byte"), grammar, limits=parser_limits(grammar))
        text = ""
        while not matcher.is_stopped():
            allowed = [chr(byte) for byte in range(128) if matcher.validate_tokens([byte])]
            text += next(
                character for character in ["\n", " ", "1", *allowed] if character in allowed
            )
            matcher.consume_token(ord(text[-1]))
        assert json.loads(text) == {"a": 1, "b": 1}
        assert len(text) <= 67


def test_compact_and_indented_json_are_answers():
    value = {"root": {"kids": [{"kids": []}, {"kids": [{}]}]}, "any": {"a": {"b": [1]}}}
    for options in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}):
        assert accepts(make("json", PAIR), json.dumps({"a": 1, "b": 2}, **options))
        assert accepts(make("json", {"type": "object"}), json.dumps(value["any"], **options))
        if options.get("indent") != 4:
            assert accepts(make("json", TREE), json.dumps(value, **options))


def test_a_request_may_have_other_whitespace():
    constraint = Constraint("json", json.dumps(PAIR), "p", whitespace=r"[ \t\n]{1,40}")
    assert accepts(compiled(constraint), '{"a":1,' + " " * 40 + '"b":\t2}')
    assert constraint.digest != Constraint("json", constraint.text, "p").digest
    with pytest.raises(Invalid) as error:
        compiled(Constraint("json", "{}", "p", whitespace="(("))
    assert error.value.param == "structured_outputs.whitespace_pattern"


@pytest.mark.parametrize("pattern", [" ", r"\s*", "a", "[*]", "0", r" |\x41", "[^a]", ".", "[ -~]"])
def test_whitespace_is_that_of_json(pattern):
    assert is_whitespace(pattern) == (pattern == " ")
    assert all(map(is_whitespace, (r"[\x20\x0A\x0D\x09]{1,8}", r"\n( {2}){0,9}| ?", r"[ \t\n]*")))


def test_a_property_written_with_escapes_is_no_other_property():
    grammar = make("json", {"properties": {"a": {"type": "integer"}}})
    assert accepts(grammar, '{"a":1,"b":"x"}')
    assert not accepts(grammar, '{"\\u0061":"x"}')
    for kind in ("patternProperties", "properties"):
        rest = {kind: {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
        grammar = make("json", rest)
        assert accepts(grammar, '{"b": "x"}')
        assert not accepts(grammar, '{"\\u0061": "x"}')


def test_a_control_character_that_no_answer_can_have_is_refused_wherever_it_is_demanded():
    places = {
        "const": {"const": "a\0b"},
        "enum": {"enum": ["a\nb", {"x": ["\1"]}]},
        "properties": {"properties": {"a\x1f": {}}},
        "required": {"required": ["\x0b"]},
        "pattern": {"pattern": r"a\u0001"},
    }
    for keyword, asked in places.items():
        assert refused("json", asked)[0] == f"s.{keyword}"
    assert accepts(make("json", {"enum": ["a\n\t\b\f\r"]}), '"a\\n\\t\\b\\f\\r"')
    assert make("json", {"title": "\0", "default": "\0"})
    assert accepts(make("json", {"pattern": r"^[^\x00-\x1f]$"}), '"a"')


def test_dates_and_times_exist():
    for name, good, bad in [
        ("date", "2000-02-29", "1900-02-29"),
        ("date", "2023-12-31", "2023-02-29"),
        ("time", "23:59:59Z", "23:59:60Z"),
        ("date-time", "2024-02-29T10:00:00-02:00", "2023-02-29T10:00:00-02:00"),
        ("date-time", "2023-02-28t10:00:59.5z", "2023-02-28t10:00:60.5z"),
    ]:
        grammar = make("json", {"format": name, "allOf": [{"minLength": 3}]})
        assert accepts(grammar, f'"{good}"')
        assert not accepts(grammar, f'"{bad}"')


def test_a_host_and_an_address_have_no_more_characters_than_they_may():
    """A name of four labels has 255 characters, and one with xn-- may not be decodable."""
    label = "a" * 63
    longest = ".".join([label] * 3 + ["b" * 61])
    hosts = {longest: True, f"{longest}b": False, "a--b": True, "a.bc--d": False, "xn--a": False}
    grammar = make("json", {"format": "hostname"})
    assert {host: accepts(grammar, f'"{host}"') for host in hosts} == hosts
    grammar = make("json", {"type": "string", "format": "email"})
    for address in (f"{'a' * 64}@b.c", f"a@{label}.b", "a@[1.2.3.4]", f"a@{longest[2:]}"):
        assert accepts(grammar, f'"{address}"')
    for address in (f"{'a' * 65}@b.c", f"a@{label}b.c", "a@bc--d.e", f"ab@{longest[1:]}"):
        assert not accepts(grammar, f'"{address}"')


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "-0", "0.0", "0.6"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.1", "-0.5"], ["0", "-0", "-0.6"]),
        ({"exclusiveMinimum": 5, "exclusiveMaximum": 5.5}, ["5.25"], ["5", "5.0", "5.5"]),
        ({"exclusiveMaximum": -5, "minimum": -5.5}, ["-5.25"], ["-5", "-5.0"]),
        ({"allOf": [{"exclusiveMinimum": 7}, {"maximum": 7.25}]}, ["7.1"], ["7", "7.0"]),
        ({"exclusiveMinimum": 0, "minimum": 2}, ["2", "3.5"], ["0", "1"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 100}, ["99.9", "1"], ["0", "100"]),
        ({"exclusiveMinimum": 2**53 - 2, "type": "integer"}, [f"{2**53 - 1}"], [f"{2**53 - 2}"]),
    ],
    ids=str,
)
def test_a_number_that_a_limit_excludes_is_excluded(asked, good, bad):
    grammar = make("json", {"type": "number"} | asked)
    assert [number for number in good + bad if accepts(grammar, number)] == good


def test_a_number_that_llguidance_would_misread_is_refused():
    for asked in (-99.29615158058975, 9007199254640991.0, 1e-30, 0.1 + 0.2):
        for keyword in ("const", "minimum", "exclusiveMaximum"):
            assert refused("json", {"items": {keyword: asked}})[0] == f"s.items.{keyword}"
    for asked in (0.123456789012345, 2**53 - 1, -0.00025):
        assert accepts(make("json", {"enum": ["a", asked]}), json.dumps(asked))


def test_a_format_and_a_pattern_that_are_too_much_work_together_are_found_at_their_place():
    pattern = r"^\w+([\.-]?\w+)*@\w+([\.-]?\w+)*(\.\w{2,})+$"
    path = refused("json", {"items": {"format": "email", "pattern": pattern}})[0]
    assert path in ("s.items.format", "s.items.pattern")


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (False, ""),
        ({"properties": {"a": {"patternProperties": {"^a": {}, "b$": {"type": "null"}}}}},
         ".properties.a.patternProperties"),
        ({"$defs": {"d": {"anyOf": [{"type": "null"}, {"pattern": "(?=x)"}]}},
          "items": {"$ref": "#/$defs/d"}}, ".$defs.d.anyOf[1].pattern"),
        ({"properties": {f"p{i}": {"type": "string", "pattern": "[" if i == 77 else "a"}
                         for i in range(100)}}, ".properties.p77.pattern"),
        ({"items": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, ".items.oneOf"),
        ({"items": {"minProperties": 2, "properties": {"a": {"type": "null"}, "b": {}}}},
         ".items.minProperties"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, ".required"),
    ],
)  # fmt: skip
def test_the_part_of_a_schema_that_cannot_be_enforced_is_found(asked, path):
    assert refused("json", asked)[0] == f"s{path}"


OVERLAPPING = {"oneOf": [{"type": "string"}, {"minLength": 2, "type": ["string", "integer"]}]}
OF_ANOTHER_BASE = {"$id": "u", "$defs": {"n": INTEGER}, "$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    ("asked", "left_out", "good", "bad"),
    [
        ({"properties": {"a": INTEGER | {"not": {}}, "b": INTEGER}}, ["properties.a.not"],
         ['{"a": 1}'], ['{"a": "x"}', '{"b": "x"}']),
        ({"patternProperties": {"(?!x)a": INTEGER}, "additionalProperties": False,
          "required": ["b"]}, ["patternProperties", "additionalProperties"],
         ['{"b": 1, "a": 2}'], ["{}"]),
        ({"properties": {"a": OVERLAPPING, "b": {"items": OVERLAPPING}, "c": INTEGER}},
         ["properties.a.oneOf", "properties.b.items.oneOf"],
         ['{"a": "xyz", "b": ["x"], "c": 1}'], ['{"a": []}', '{"b": [null]}', '{"c": "x"}']),
        ({"properties": {"a": {"prefixItems": [INTEGER, 7], "items": False}}},
         ["properties.a.prefixItems[1]"], ['{"a": [1, "x"]}'], ['{"a": ["x"]}', '{"a": [1, 2, 3]}']
        ),
        ({"properties": {"a": {"$ref": "#/$defs/n", "minimum": 3}}}, ["properties.a.$ref"],
         ['{"a": 3}'], ['{"a": 2}']),
        ({"properties": {"a": OF_ANOTHER_BASE}, "$defs": {"n": {"type": "string"}}},
         ["properties.a.$id"], ['{"a": 1}'], []),
        ({"properties": {name: {"multipleOf": 3 if name == "b" else 9973} for name in "abc"}},
         ["properties.b.multipleOf"], ['{"b": 1, "c": 9973}'], ['{"a": 1}', '{"c": 1}']),
        ({"properties": {f"p{i}": INTEGER | {"x": 1} for i in range(MAX_LEFT_OUT + 1)}}, [""],
         ['{"p0": "x"}'], ["[]"]),
        ({"properties": {"a": nested(MAX_DEPTH)}}, ["properties.a" + ".items" * MAX_DEPTH],
         ['{"a": []}'], ['{"a": 1}']),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_left_out_at_its_place_and_named(asked, left_out, good, bad):
    kept, paths = enforceable_schema({"type": "object", **asked}, "s", inf)
    assert sorted(paths) == sorted(f"s.{path}".rstrip(".") for path in left_out)
    grammar = json.dumps({"grammars": [{"json_schema": kept}]})
    assert [text for text in good + bad if accepts(grammar, text)] == good


def test_any_object_is_let_in_where_there_is_no_time_to_search_a_schema():
    for ends, path in ((inf, "s.properties.a.oneOf"), (0.0, "s")):
        asked = {"type": "object", "properties": {"a": OVERLAPPING}}
        assert enforceable_schema(asked, "s", ends)[1] == [path]


def test_objects_that_a_property_tells_apart_may_be_branches_of_one_of():
    """Pydantic's unions with a discriminator refer to their branches."""

    def union(second, **changed):
        tagged = {"type": "object", "properties": {"t": {"const": "p"}}, "required": ["t"]}
        branches = [{"$ref": "#/$defs/p"}, {"$ref": f"#/$defs/{second}"}]
        other = tagged | {"properties": {"t": {"enum": ["q", "r"]}}} | changed
        return {"oneOf": branches, "$defs": {"p": tagged, "q": other}}

    grammar = make("json", union("q"))
    assert [accepts(grammar, f'{{"t": "{tag}"}}') for tag in "pqrs"] == [True, True, True, False]
    shared = {"properties": {"t": {"enum": ["q", "p"]}}}
    anything = {"properties": {"t": True}}
    for ambiguous in (shared, anything, {"required": []}, {"type": ["object", "null"]}):
        assert refused("json", union("q", **ambiguous))[0] == "s.oneOf"
    assert refused("json", union("p"))[0] == "s.oneOf"


def test_expressions_match_whole_answers_and_choices_are_taken_literally():
    assert accepts(make("regex", "^a/b|c$"), "a/b")
    assert not accepts(make("regex", "b"), "abc")
    assert refused("regex", "a\\")[1] == "s: it ends with a backslash."
    assert "look-around" in refused("regex", "(?=x)")[1]
    for text in ('"', "\\", "é\n😀", "\x7f", "<|x|>", "/a*/"):
        grammar = make("choice", [text, "b"])
        assert [accepts(grammar, t) for t in (text, "b", text + "b")] == [True, True, False]


@pytest.mark.parametrize(
    ("grammar", "door"),
    [
        ('start: "a" %json {"type": "string"}', "%json"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
        ('start: %lark {\nstart: "a"\n}', "%lark"),
        ("start: <|eot|>", "<"), ("start: <\x1c>", "<"), ("start: <[1-5]>", "<"),
        ("start: @other", "@"), ("start[max_tokens=3]: /a+/", "max_tokens"),
        ("start[temperature = 0.1]: /a+/", "temperature"), ('start[stop="x"]: /a+/', "stop"),
        ('start: %regex {"substring_chars": "\x7f"} <x>', "<"),
        ('start: "a" // "\nb: <x> "', "<"), ("start: /a\\\nb/ <x> /c/", "<"),
        ('{"grammars": [{"json_schema": {"nullable": 1}}]}', "expecting rule"),
        ('start: "a', "lexer error"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_grammar_has_no_door_to_more_than_the_texts_shape(grammar, door):
    assert door in refused("lark", grammar)[1]


def test_in_strings_expressions_and_comments_a_grammar_may_say_anything():
    text = '// %json <x>\nstart: "<|a|> %json \\"@" /<b>@%json/ stop # <y> stop=\nstop: "stop="'
    assert accepts(make("lark", text), '<|a|> %json "@<b>@%jsonstop=')


def test_rules_and_references_are_too_few_to_overflow_the_stack():
    """llguidance recurses through them; 3,000 in a chain end the process."""
    rules = [f'r{i}: "a" r{i + 1}' for i in range(MAX_LEVELS - 3)]
    text = "\n".join(["start: r0", *rules, f'r{len(rules)}: ("x")'])
    assert make("lark", text)
    assert "rules and brackets" in refused("lark", f"{text}\ns: text")[1]
    # A definition has two levels here, the last one has one, and the root has three.
    defs = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(MAX_LEVELS // 2 - 2)}
    chain = {"$ref": "#/$defs/d0", "$defs": defs | {f"d{len(defs)}": {"type": "null"}}}
    assert make("json", chain)
    assert "levels" in refused("json", chain | {"items": {"items": {"items": {}}}})[1]


def test_what_takes_seconds_to_compile_and_cannot_be_stopped_is_refused_before():
    assert make("json", {"allOf": [{"multipleOf": 0.25}, {"multipleOf": 400}]})
    assert refused("json", {"items": {"multipleOf": 10_001}})[0] == "s.items.multipleOf"
    assert refused("json", {"anyOf": [{"multipleOf": n} for n in (97, 89, 83)]})[0].endswith("Of")
    patterns = {f"^{i}$": True for i in range(51)}
    assert refused("json", {"patternProperties": patterns})[0] == "s.patternProperties"
    assert "operator &" in refused("lark", "start: A\nA: " + " & ".join(["/a.*/"] * 12))[1]


def test_a_schema_may_have_a_thousand_optional_properties():
    """An engine's limits are the same; each answer here is masked at every byte."""
    properties = {f"p{i}": {"type": ["integer", "string"]} for i in range(1000)}
    grammar = make("json", {"properties": properties, "additionalProperties": False})
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=parser_limits(grammar))
    for byte in b'{"p0": 1, "p1": "a", "p500": 2, "p999": 3}':
        matcher.compute_bitmask()
        assert matcher.consume_token(byte), matcher.get_error()
    assert matcher.is_accepting()


@pytest.mark.parametrize("kind", MAX_BYTES)
def test_a_text_has_a_limit_in_bytes(kind):
    assert Constraint(kind, "é" * (MAX_BYTES[kind] // 2), "s")
    with pytest.raises(Invalid):
        Constraint(kind, "é" * (MAX_BYTES[kind] // 2) + "x", "s")
