"""Prompts with tools: the model's own template as in transformers, or text where it knows none."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from server.text.tokenizer import TemplateError, Tokenizer
from server.tools.built_in import BUILT_IN
from server.tools.dialect import Dialect
from server.tools.parser import AnswerParser, Parsed
from server.tools.tool import Tool, ordered
from server.tools.writing import written_calls
from tests.server.tools.descriptions import DESCRIPTIONS
from tests.tokenizer_families import make_tokenizer

TEMPLATES = Path(__file__).parents[1] / "text" / "chat_templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"ort": {"type": "string", "description": "Wo?"}, "days": {"type": "integer"}},
    "required": ["ort"],
}
TOOL = Tool("wetter", "Wie wird's?", ordered(WEATHER), False, "tools[0]").declared
CALL = {"id": "call_123", "type": "function",
        "function": {"name": "wetter", "arguments": '{"ort": "Köln", "days": 2}'}}  # fmt: skip
CHAT = [
    {"role": "user", "content": "Wie wird's?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_123", "content": "sonnig"},
]


def folder(path, source=CHATML, **config):
    make_tokenizer("llama3").save(str(path / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    path.joinpath("tokenizer_config.json").write_text(json.dumps({**tokens, **config}))
    path.joinpath("chat_template.jinja").write_text(source)
    return path


@pytest.fixture
def model(tmp_path):
    def make(source=CHATML, **config):
        tokenizer = Tokenizer(folder(tmp_path, source, **config))
        return tokenizer, Dialect.of_base(tokenizer)

    return make


def rendered(tokenizer, dialect, chat, tools=(TOOL,), **options):
    options = {"begins": True, "continues": False} | options
    return dialect.prompt(tokenizer, chat, tools, **options)


@pytest.mark.parametrize(
    ("name", "family"),
    [("qwen2", "hermes"), ("qwen3", "hermes"), ("llama3", "llama3_json"), ("mistral3", "mistral"),
     ("llama2", None), ("mistral1", None)],
)  # fmt: skip
def test_a_models_format_is_the_one_that_its_template_writes(model, name, family):
    _, dialect = model((TEMPLATES / f"{name}.jinja").read_text())
    assert dialect.is_native == (family is not None)
    assert dialect.template.calls == BUILT_IN[family or "hermes"].calls
    assert (dialect.template.reasoning is not None) == (name == "qwen3")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3", "mistral3"])
def test_templates_get_messages_and_tools_as_transformers_gives_them(model, tmp_path, name):
    tokenizer, dialect = model((TEMPLATES / f"{name}.jinja").read_text())
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    function = CALL["function"] | {"arguments": json.loads(CALL["function"]["arguments"])}
    call_id = "abcdefghi" if name == "mistral3" else "call_123"
    called = {"role": "assistant", "tool_calls": [CALL | {"function": function, "id": call_id}]}
    result = CHAT[2] | {"tool_call_id": call_id}
    ours = [CHAT[0], {"role": "assistant", "tool_calls": [CALL | {"id": call_id}]}, result]
    for length in (1, 3):
        expected = theirs.apply_chat_template(
            [CHAT[0], called, result][:length], tools=[TOOL], tokenize=False,
            add_generation_prompt=True,
        )  # fmt: skip
        assert rendered(tokenizer, dialect, ours[:length]) == expected


def test_mistral_gets_ids_that_its_template_accepts(model):
    tokenizer, dialect = model((TEMPLATES / "mistral3.jinja").read_text())
    text = rendered(tokenizer, dialect, CHAT)
    call_id = text.split('"id": "')[1][:9]
    assert re.fullmatch("[a-z0-9]{9}", call_id)
    with pytest.raises(TemplateError):
        tokenizer.chat_template.render([*CHAT[:1], {**CHAT[1], "content": ""}, CHAT[2]], [TOOL])


@pytest.mark.parametrize(
    "arguments", ["[" * 200_000, '{"a":' * 900 + "1" + "}" * 900, '{"ort": "\\ud800"}', "{", ""]
)
def test_arguments_that_are_no_object_which_a_prompt_can_have_stay_text(model, arguments):
    tokenizer, dialect = model((TEMPLATES / "qwen2.jinja").read_text())
    call = CALL | {"function": {"name": "wetter", "arguments": arguments}}
    text = rendered(tokenizer, dialect, [CHAT[0], {"role": "assistant", "tool_calls": [call]}])
    assert json.dumps(arguments) in text
    tokenizer.encode(text)


def test_a_model_whose_template_knows_no_tools_is_told_in_the_system_message(model):
    tokenizer, dialect = model()
    text = rendered(tokenizer, dialect, [{"role": "system", "content": "Be kind."}, *CHAT])
    system, question, call, result, begun = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe kind.\n\n")
    assert json.dumps(TOOL["function"], ensure_ascii=False) in system
    assert "Wie wird's?" in question
    assert call == (
        'assistant\n<tool_call>\n{"name": "wetter", "arguments": {"ort": "Köln", "days": 2}}\n'
        "</tool_call><|im_end|>\n"
    )
    assert result == "user\n<tool_response>\nsonnig\n</tool_response><|im_end|>\n"
    assert begun == "assistant\n"


def test_results_of_several_calls_are_one_message_of_the_user(model):
    tokenizer, dialect = model()
    chat = [CHAT[0], {"role": "assistant", "content": "So:", "tool_calls": [CALL, CALL]},
            CHAT[2], CHAT[2]]  # fmt: skip
    turns = rendered(tokenizer, dialect, chat, ()).split("<|im_start|>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == ["user", "assistant", "user", "assistant"]
    assert turns[1].startswith("assistant\nSo:\n<tool_call>")
    assert turns[2].count("sonnig") == 2


def test_a_template_without_a_system_message_is_told_in_the_first_question(model):
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer, dialect = model(refuses + CHATML)
    text = rendered(tokenizer, dialect, CHAT[:1])
    assert text.startswith("<|im_start|>user\nYou can call tools.")
    assert "Wie wird's?<|im_end|>" in text


def test_an_answer_may_be_continued_beside_tools(model):
    tokenizer, dialect = model()
    chat = [CHAT[0], {"role": "assistant", "content": "Let me"}]
    assert rendered(tokenizer, dialect, chat, continues=True).endswith("assistant\nLet me")


def test_a_described_format_wins_and_one_that_is_not_served_is_left(model):
    described = json.loads(json.dumps(DESCRIPTIONS["hermes"]).replace("tool_call>", "act>"))
    _, dialect = model(response_template=described)
    assert dialect.template.calls.opens == ("<act>",)
    assert not dialect.is_native
    odd = {"start_anchor": "x", "fields": {"tool_calls": {"content": "xml-inline"}}}
    _, dialect = model(response_template=odd)
    assert dialect.template.calls == BUILT_IN["hermes"].calls


def test_a_description_of_reasoning_alone_leaves_the_calls_to_the_chat_template(model):
    described = {"start_anchor": "<a>", "fields": {"thinking": {"open": "<hm>", "close": "</hm>"}}}
    for source, is_native in (((TEMPLATES / "qwen2.jinja").read_text(), True), (CHATML, False)):
        _, dialect = model(source, response_template=described)
        assert dialect.is_native == is_native
        assert dialect.template.calls == BUILT_IN["hermes"].calls
        assert dialect.template.reasoning.opens == ("<hm>",)
        assert dialect.template.anchors == ("<a>",)


def test_an_adapter_may_write_in_another_way_than_its_base(model):
    tokenizer, base = model((TEMPLATES / "qwen2.jinja").read_text())
    same = base.of_adapter(tokenizer, BUILT_IN["hermes"])
    assert same.is_native
    assert same.template.reasoning
    other = base.of_adapter(tokenizer, BUILT_IN["mistral"])
    text = rendered(tokenizer, other, CHAT)
    assert '[TOOL_CALLS][{"name": "wetter", "arguments": {"ort": "Köln", "days": 2}}]' in text
    assert '[TOOL_CALLS][{"name": "NAME", "arguments": {ARGUMENTS}}]' in text


@pytest.mark.parametrize("family", sorted(BUILT_IN))
def test_written_calls_are_parsed_again(family):
    calls = [("wetter", '{"ort": "Köln"}'), ("now", "{}")][: 1 if family == "llama3_json" else 2]
    text, whole = written_calls(BUILT_IN[family].calls, calls), Parsed()
    parser = AnswerParser(BUILT_IN[family], ["wetter", "now"])
    whole.append(parser.push(text, final=True))
    assert [(call.name, call.arguments) for call in whole.calls] == calls
    assert parser.is_whole
    assert not whole.content


def shuffled(value, random):
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        keys = random.sample(list(value), len(value))
        return {key: shuffled(value[key], random) for key in keys}
    return [shuffled(inner, random) for inner in value] if isinstance(value, list) else value


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
schemas = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["type", "properties", "required", "items", "enum", "b", "a", "default"]),
        inner, max_size=5,
    ),
    max_leaves=12,
)  # fmt: skip


@given(parameters=st.dictionaries(st.text(max_size=3), schemas), random=st.randoms())
def test_a_tool_has_the_same_bytes_in_any_order_of_its_keys(parameters, random):
    """The prompt is the same then, and its blocks are found in the prefix cache."""
    texts = [
        json.dumps(Tool("f", "d", ordered(each), False, "tools[0]").declared)
        for each in (parameters, shuffled(parameters, random))
    ]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["function"]["parameters"] == (
        parameters or {"type": "object", "properties": {}}
    )


def test_a_schema_that_is_none_is_put_in_order_too():
    """The order is made before the schema is checked."""
    odd = {"properties": {"a": {}}, "required": [["a"], {}, None, "b"], "type": ["object"]}
    assert ordered(odd) == odd
    assert ordered({"properties": 3, "required": "ab"}) == {"properties": 3, "required": "ab"}


def test_required_properties_keep_the_order_in_which_they_are_required():
    asked = {"properties": {"c": {}, "a": {}, "b": {}}, "required": ["b", "c"], "type": "object"}
    assert list(ordered(asked)["properties"]) == ["b", "c", "a"]
    assert list(ordered(asked)) == ["type", "properties", "required"]
