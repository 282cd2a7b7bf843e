"""Descriptions in transformers' form: what is served, and which part of one is refused."""

import copy

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from registry.errors import Invalid
from server.tools.response_template import MAX_BYTES, read_template
from tests.server.tools.descriptions import DESCRIPTIONS

HERMES = DESCRIPTIONS["hermes"]


@pytest.mark.parametrize("name", sorted(DESCRIPTIONS))
def test_the_built_in_descriptions_are_transformers_own_form(name):
    assert load_response_template(DESCRIPTIONS[name]).fields.keys() >= {"tool_calls", "content"}


def test_descriptions_of_published_models_are_served():
    smollm3 = copy.deepcopy(HERMES)
    smollm3["fields"]["content"] = {"close": "<|im_end|>", "content": "text"}
    assert read_template(smollm3).reasoning.opens == ("<think>",)
    keys = {"name": "{tool_name}", "arguments": "{parameters}"}
    listed = {
        "version": 1,
        "start_anchor": ["<a>", "<b>"],
        "fields": {
            "tool_calls": {
                "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json",
                "transform_each": True, "transform": {"type": "function", "function": keys},
            },
        },
    }  # fmt: skip
    template = read_template(listed)
    assert template.anchors == ("<a>", "<b>")
    assert template.calls.is_list
    assert (template.calls.name_key, template.calls.arguments_key) == ("tool_name", "parameters")
    assert template.reasoning is None


def changed(path, value):
    spec = copy.deepcopy(HERMES)
    *steps, last = path.split(".")
    place = spec
    for step in steps:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return spec


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("start_anchor", None),
        ("start_anchor", ""),
        ("fields.thinking.open", "a\x7f"),
        ("fields.thinking.open", "\x1c"),
        ("fields", []),
        ("fields.images", {}),
        ("fields.reasoning", {"open": "<r>", "close": "</r>"}),
        ("fields.thinking.open", ["<a>", 3]),
        ("fields.thinking.close", None),
        ("fields.thinking.content", "json"),
        ("fields.thinking.close_pattern", "</think>"),
        ("fields.content.open", "<c>"),
        ("fields.tool_calls.open", "x" * 65),
        ("fields.tool_calls.open", [f"<{i}>" for i in range(9)]),
        ("fields.tool_calls.content", "xml-inline"),
        ("fields.tool_calls.content_args", {"unquoted_keys": True}),
        ("fields.tool_calls.open_pattern", "(a+)+(?P<name>b)"),
        ("fields.tool_calls.open_pattern", r"\A(?=x)"),
        ("fields.tool_calls.transform", "{content}"),
        ("fields.tool_calls.transform.function", {"name": "{a b}", "arguments": "{content.a}"}),
        ("fields.tool_calls.transform.function", {"name": "{content.n}"}),
    ],
)
def test_a_part_that_is_not_served_is_named_by_its_path(path, value):
    with pytest.raises(Invalid) as error:
        read_template(changed(path, value))
    assert f"response_template.{path}".startswith(error.value.param.rpartition(".")[0])
    assert str(error.value).startswith(error.value.param)


def test_a_long_description_is_refused():
    with pytest.raises(Invalid, match=str(MAX_BYTES)):
        read_template({"start_anchor": "x" * MAX_BYTES})
