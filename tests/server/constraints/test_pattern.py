"""Patterns as JavaScript reads them: what an answer may be, and what is refused by its path."""

import json

import pytest

from tests.server.constraints.test_grammar import accepts, make, refused


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        (r"^[^\\]{1,4}$", ["a", '"', "\n"], ["\\", "a\\"]),
        ('^[^"]$', ["a", "\\"], ['"']),
        (r"^[^\n\\]$", ["a", '"', "\t"], ["\n", "\\"]),
        (r"^[\x00-!]$", ["!", "\n"], ['"', "\\"]),
        (r"^\P{Po}$", ["a", "+"], ['"', "\\", "!"]),
        (r"^(?i:[^k])$", ["j"], ["k", "K", "\u212a"]),
        (r"^(?i)\\$", ["\\"], ['"']),
        ("^[[:alpha:]]$", [":]", "a]"], ["a", "b"]),
        ("^[a-z&&c]$", ["a", "c", "&"], ["A"]),
        ("^[!~~~]$", ["!", "~"], ["a"]),
        ("^[+--]$", ["+", ",", "-"], ["."]),
        ("^[a[b]]$", ["a]", "[]", "b]"], ["a", "b", "["]),
        (r"^[\w-.]$", ["a", "-", "."], [",", "é"]),
        (r"^\s$", ["\ufeff", "\xa0", "\n"], ["\x85", "a"]),
        (r"^\S$", ["\x85", "a", '"'], ["\ufeff", "\xa0"]),
        (r"^[^\s,]$", ["\x85", "a"], ["\ufeff", ","]),
        (r"^[\d\W]$", ["0", "é", "\\"], ["a", "_"]),
        ("^.$", ["a", "\\", "\x85"], ["\n", "\r", "\u2028"]),
        (r"^\u0041\x42\u{43}\/\-\@$", ["ABC/-@"], ["ABC"]),
        ("^a(?<stop>b*)(?P<c>c?)$", ["a", "abb", "abc"], ["b", "acb"]),
        ("(a|^b)c+?$", ["xac", "bcc"], ["xbc", "acx"]),
    ],
)
def test_a_pattern_means_what_it_means_in_javascript(pattern, matched, others):
    value = make("json", {"pattern": pattern})
    name = make("json", {"patternProperties": {pattern: True}, "additionalProperties": False})
    for text in (*matched, *others):
        quoted = json.dumps(text, ensure_ascii=False)
        assert accepts(value, quoted) == (text in matched), text
        assert accepts(name, f"{{{quoted}: 1}}") == (text in matched), text


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        (r"\Aa", r"\Aa"), (r"a\z", r"\z"), (r"\x{41}", r"\x{41}"), (r"\pL", r"\pL"),
        (r"\<a", r"\<a"), (r"(a)\1", r"\1"), (r"[\h]", r"[\h]"), ("a[]b]", "[]b]"),
        ("[^]", "[^]"), ("(?s)a", "(?s)a"), ("(?#a)", "(?#a)"), ("a++", "+"), ("a{2}{3}", "{3}"),
    ],
)  # fmt: skip
def test_what_another_language_means_by_it_is_refused_with_its_beginning(pattern, part):
    message = f"{part} is not supported; write it as JavaScript does with flag u."
    assert refused("json", {"items": {"pattern": pattern}}) == (
        "s.items.pattern", f"s.items.pattern: {message}"
    )  # fmt: skip
    assert refused("json", {"patternProperties": {pattern: True}}) == (
        "s.patternProperties", f"s.patternProperties: {message}"
    )  # fmt: skip


def test_patterns_of_names_that_mean_the_same_are_refused_and_faults_keep_their_paths():
    same = {"patternProperties": {r"^\d$": {"minimum": 1}, "^[0-9]$": {"maximum": 2}}}
    assert refused("json", same)[0] == "s.patternProperties"
    inner = {"patternProperties": {"^.$": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}}
    assert refused("json", inner)[0] == 's.patternProperties["^.$"].oneOf'
    referring = {"$ref": "#/patternProperties/a", "patternProperties": {"a": {"type": "null"}}}
    assert refused("json", referring)[0] == "s.$ref"
