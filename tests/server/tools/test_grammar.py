"""Grammar against parser: whatever is enforced is parsed, on whole and on broken answers."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.limits import parser_limits
from registry.errors import Invalid
from server.constraints.constraint import Constraint
from server.tools.built_in import BUILT_IN
from server.tools.grammar import AnswerForm
from server.tools.parser import AnswerParser, Parsed
from server.tools.response_template import PLAIN
from server.tools.tool import Tool, ToolUse
from tests.server.tools.transcripts import NAMES, TRANSCRIPTS
from tests.tokenizer_families import make_tokenizer

ANYTHING = {"type": "object", "additionalProperties": True}
TOOLS = tuple(Tool(name, None, ANYTHING, True, f"tools[{i}]") for i, name in enumerate(NAMES))
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CONSTRAINT = Constraint("json", json.dumps(PERSON), "response_format")
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]",
         "[/THINK]", "<|python_tag|>", '{"name": "now", "arguments": {}}', '{"name": "', "}", "]",
         "[", ", ", "\n", " ", '"', "\\", "a", "é", "1"]  # fmt: skip


_started = {}


def form(
    family, mode="auto", *, is_parallel=True, constraint=None, tools=TOOLS, is_reasoning=False
):
    use = ToolUse(tools, mode, tuple(tool.name for tool in tools), is_parallel) if tools else None
    return AnswerForm(BUILT_IN[family], use, constraint, {}, is_reasoning)


def begun(wanted):
    """A matcher at the start of an answer; compiled once for all examples."""
    if wanted.digest not in _started:
        grammar = wanted.compiled().text
        limits = parser_limits(grammar)
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
        assert not matcher.get_error()
        _started[wanted.digest] = matcher
    return _started[wanted.digest].deep_copy()


def accepts(wanted, text):
    matcher, tokens = begun(wanted), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def parsed(family, text, names, most_calls=None):
    parser, whole = AnswerParser(BUILT_IN[family], names, most_calls), Parsed()
    whole.append(parser.push(text, final=True))
    return whole, parser


def in_one_spelling(text, calls):
    """The answer with the arguments of its calls as json.dumps writes them."""
    place = 0
    for call in calls:
        place = text.index(call.arguments, place)
        spelled = json.dumps(json.loads(call.arguments), ensure_ascii=False)
        text = text[:place] + spelled + text[place + len(call.arguments) :]
        place += len(spelled)
    return text


@pytest.mark.parametrize("told", TRANSCRIPTS, ids=lambda told: f"{told.family} {told.text}")
def test_every_answer_of_its_family_may_be_given(told):
    assert accepts(form(told.family), told.text)
    may_be_required = told.calls and not told.content
    assert accepts(form(told.family, "required"), told.text) == bool(may_be_required)
    if len(told.calls) == 1 and told.is_plain:
        assert accepts(form(told.family, is_parallel=False), told.text)
    if len(told.calls) > 1 and not told.content:
        assert not accepts(form(told.family, "required", is_parallel=False), told.text)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_grammar_allows_what_the_parser_takes_apart_and_nothing_else(data):
    told = data.draw(st.sampled_from(TRANSCRIPTS))
    text = told.text
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = at + data.draw(st.integers(0, 3))
        text = text[:at] + data.draw(st.sampled_from(["", *MARKS])) + text[end:]
    is_parallel = data.draw(st.booleans())
    tools = data.draw(st.sampled_from([TOOLS, TOOLS[:1], TOOLS[1:]]))
    names = [tool.name for tool in tools]
    whole, parser = parsed(told.family, text, names, None if is_parallel else 1)
    wanted = form(told.family, is_parallel=is_parallel, tools=tools)
    if accepts(wanted, text):
        assert parser.is_whole
    elif parser.is_whole:
        assume(all("1e" not in call.arguments for call in whole.calls))
        spelled = in_one_spelling(text, whole.calls)
        assert accepts(wanted, spelled)


def test_a_reasoning_part_may_come_before_what_is_required():
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    open_, not_open = (form("hermes", "required", is_reasoning=flag) for flag in (True, False))
    assert accepts(open_, f"a <tool_call> b</think>\n\n{call}")
    assert not accepts(open_, call)
    assert accepts(not_open, f"<think>a</think>\n\n{call}")
    assert accepts(not_open, call)
    assert not accepts(not_open, f"a{call}")
    shaped = form("hermes", constraint=CONSTRAINT, tools=(), is_reasoning=True)
    assert accepts(shaped, 'Thirty.\n</think>\n\n{"age": 30}')
    assert not accepts(shaped, "Thirty.\n</think>\n\nthirty")


def test_an_answer_is_calls_or_has_the_shape_that_was_asked_for():
    both = form("hermes", constraint=CONSTRAINT)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(both, call)
    assert accepts(both, '{"age": 3}')
    assert not accepts(both, "hello")
    assert accepts(
        form("llama3_json", "required", constraint=CONSTRAINT), '{"name": "now", "parameters": {}}'
    )
    with pytest.raises(Invalid) as error:
        form("llama3_json", constraint=CONSTRAINT).compiled()
    assert error.value.param == "response_format"


def test_arguments_follow_the_schema_and_tools_get_none_that_they_do_not_declare():
    tools = (Tool("f", None, PERSON, False, "tools[0]"), Tool("g", None, None, False, "tools[1]"))
    wanted = form("mistral", "required", tools=tools)

    def call(name, arguments):
        return accepts(wanted, f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]')

    assert call("f", '{"age": 3}')
    assert call("g", "{}")
    for name, arguments in [
        ("f", "{}"),
        ("f", '{"age": 3, "b": 1}'),
        ("g", '{"a": 1}'),
        ("h", "{}"),
    ]:
        assert not call(name, arguments)


def test_a_schema_that_cannot_be_enforced_is_refused_if_the_tool_is_strict():
    odd = {"type": "object", "properties": {"a": {"not": {}, "type": "integer"}}}
    strict = form("hermes", tools=(*TOOLS, Tool("odd", None, odd, True, "tools[3]")))
    path = "function.parameters.properties.a.not"
    with pytest.raises(Invalid) as error:
        strict.compiled()
    assert error.value.param == f"tools[3].{path}"
    free = form("hermes", tools=(Tool("odd", None, odd, False, "tools[0]"),))
    assert free.compiled().not_enforced == (f"tools[0].{path}",)
    for arguments, may_be in (('{"a": 1}', True), ('{"a": [1]}', False), ('{"b": 1}', False)):
        call = f'<tool_call>{{"name": "odd", "arguments": {arguments}}}</tool_call>'
        assert accepts(free, call) == may_be


@pytest.mark.parametrize(
    "more",
    [
        {"if": {"required": ["a"]}, "then": {"properties": {"b": {"type": "integer"}}}},
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
        {"unevaluatedProperties": {"type": "integer"}},
        {"required": ["b"]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_an_argument_that_is_declared_elsewhere_than_among_the_properties_may_be_given(more):
    asked = {"type": "object", "properties": {"a": {"type": "integer"}}} | more
    free = form("hermes", tools=(Tool("f", None, asked, False, "tools[0]"),))
    assert accepts(free, '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 2}}</tool_call>')


def test_the_paths_of_what_is_not_enforced_are_limited_in_number_and_length():
    odd = {"properties": {"x" * 64: {"properties": {"y" * 64: {"items": {"items": {}}}}}}}
    holder = odd["properties"]["x" * 64]["properties"]["y" * 64]["items"]["items"]
    holder |= {f"{'z' * 62}{i}": 1 for i in range(25)}
    free = form("hermes", tools=(Tool("f", None, odd, False, "tools[0]"),))
    *paths, rest = free.compiled().not_enforced
    assert (len(paths), rest) == (20, "and 5 more")
    assert {len(path) for path in paths} == {256}


def test_marks_that_are_tokens_are_found_as_tokens_and_as_text(tmp_path):
    """Special tokens are no text to llguidance, and a model may write their text as well."""
    marks = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<think>", "</think>")
    model = make_tokenizer("qwen2")
    model.add_special_tokens(list(marks[:2]))
    model.add_tokens(list(marks[2:]))
    model.save(str(tmp_path / "tokenizer.json"))
    ids = {mark: model.token_to_id(mark) for mark in marks}
    tokenizer = LLTokenizer(str(tmp_path / "tokenizer.json"))

    def takes(family, mode, *pieces):
        wanted = AnswerForm(
            BUILT_IN[family], ToolUse(TOOLS, mode, NAMES), None,
            {mark: ids[mark] for mark in BUILT_IN[family].marks if mark in ids},
        )  # fmt: skip
        grammar = wanted.compiled().text
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
        tokens = [
            token
            for piece in pieces
            for token in (
                [ids[piece]]
                if piece in ids
                else [t for c in piece for t in tokenizer.tokenize_str(c)]
            )
        ]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    body = '\n{"name": "now", "arguments": {}}\n'
    for mode in ("auto", "required"):
        assert takes("hermes", mode, "<tool_call>", body, "</tool_call>")
        assert takes("hermes", mode, "<think>", "hm", "</think>", "\n", "<tool_call>", body,
                     "</tool_call>")  # fmt: skip
        assert takes("hermes", mode, *"<tool_call>", body, *"</tool_call>")
        assert takes("mistral_v11", mode, "[TOOL_CALLS]", "now", "[ARGS]", "{}")
        assert not takes("mistral_v11", mode, "[TOOL_CALLS]", "rm")
    assert takes("hermes", "auto", "hi ", "<tool_call>", body, "</tool_call>", "\nbye")
    assert not takes("hermes", "auto", "hi ", "<tool_call>", "bye")


def test_a_form_that_demands_nothing_has_no_grammar():
    assert not AnswerForm(PLAIN, None, None, {}).demands
    assert not AnswerForm(BUILT_IN["hermes"], ToolUse(TOOLS, "none", NAMES), None, {}).demands
    assert AnswerForm(PLAIN, None, CONSTRAINT, {}).digest == CONSTRAINT.digest
    forms = [
        form("hermes"), form("mistral"), form("hermes", "required"),
        form("hermes", constraint=CONSTRAINT),
        form("hermes", is_parallel=False), form("hermes", is_reasoning=True),
        form("hermes", tools=TOOLS[:2]), AnswerForm(BUILT_IN["hermes"], None, CONSTRAINT, {}),
    ]  # fmt: skip
    assert len({wanted.digest for wanted in forms}) == len(forms)
