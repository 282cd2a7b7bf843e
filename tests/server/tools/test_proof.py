"""Descriptions that an upload brings: they read their own answers back, or are refused."""

import copy
import json

import pytest

from registry.errors import Invalid
from server.tools.built_in import BUILT_IN
from server.tools.proof import checked_template, stored_template
from tests.server.tools.descriptions import DESCRIPTIONS


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_built_in_formats_prove_themselves(name):
    by_name, described = (checked_template(it, "r") for it in (name, DESCRIPTIONS[name]))
    assert stored_template(by_name) == stored_template(described) == BUILT_IN[name]


def test_a_description_is_kept_in_one_order_of_its_keys():
    hermes = DESCRIPTIONS["hermes"]
    turned = dict(reversed(hermes.items()))
    assert list(turned) != list(hermes)
    assert checked_template(turned, "r") == checked_template(hermes, "r")


def changed(**marks):
    spec = copy.deepcopy(DESCRIPTIONS["hermes"])
    for field, values in marks.items():
        spec["fields"][field] |= values
    return spec


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("harmony", "the formats are hermes"),
        (changed(tool_calls={"open": "<think>"}), "cannot be told apart"),
        (changed(thinking={"close": "<"}), "cannot be told apart"),
        ({"start_anchor": "a", "fields": {"content": {}}}, "Field required"),
        ({"start_anchor": "a", "fields": {"tool_calls": []}}, "it must be an object"),
    ],
)
def test_a_description_that_cannot_work_is_refused(given, why):
    with pytest.raises(Invalid, match=why) as error:
        checked_template(given, "response_template")
    assert error.value.param.startswith("response_template")


def test_marks_may_be_of_any_printable_characters():
    for mark in ("🛠️", 'call "it"', "a/b\\", "/(.*)/", "ruf: \n", "é\u2028".strip()):
        spec = changed(tool_calls={"open": mark, "close": f"{mark}!"}, thinking={"open": "🤔"})
        assert stored_template(checked_template(spec, "r")).calls.opens == (mark,)
    keys = {"name": "{content.nämé}", "arguments": "{content.args}"}
    transform = {"type": "function", "function": keys}
    assert checked_template(changed(tool_calls={"transform": transform}), "r")


def test_what_is_stored_may_be_read_again():
    spec = changed(tool_calls={"open": ["<call>", "<function_call>"], "close": "</call>"})
    template = stored_template(checked_template(spec, "r"))
    assert template.calls.opens == ("<call>", "<function_call>")
    assert json.loads(checked_template(spec, "r")) == spec
