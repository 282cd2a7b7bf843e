"""A template gets the variables of a request that it reads; others are refused by name."""

import pytest

from registry.errors import Invalid
from server.text.template_variables import TemplateVariable, granted


def given(variables, names, *, reasons=True):
    asked = [TemplateVariable(name, value, f"the {name}") for name, value in variables.items()]
    return granted(asked, names, reasons=reasons)


@pytest.mark.parametrize(
    ("asked", "names", "values"),
    [
        ({"x": 1}, {"x", "y"}, {"x": 1}),
        ({"reasoning_effort": "low"}, {"reasoning_effort", "thinking"},
         {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"thinking"}, {"thinking": True}),
        ({"reasoning_effort": "none", "enable_thinking": False}, {"enable_thinking"},
         {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_a_template_gets_what_it_reads(asked, names, values):
    assert given(asked, names) == values


@pytest.mark.parametrize(
    ("asked", "names", "text"),
    [
        ({"x": 1}, {"b", "a"}, "the x: the model's chat template does not read .*; it reads a, b."),
        ({"x": None}, (), "the x: the model's chat template does not read this variable or any"),
        ({"reasoning_effort": "low"}, {"x"}, "the reasoning_effort: "),
        ({"enable_thinking": False}, (), "the enable_thinking: "),
        ({"enable_thinking": True, "reasoning_effort": "none"}, {"enable_thinking"},
         "the reasoning_effort: enable_thinking asks for the opposite"),
    ],
)  # fmt: skip
def test_what_it_does_not_read_is_refused_by_name(asked, names, text):
    with pytest.raises(Invalid, match=text) as refused:
        given(asked, names)
    assert refused.value.param == f"the {list(asked)[-1]}"


@pytest.mark.parametrize("asked", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_no_reasoning_is_what_a_model_without_reasoning_gives_anyway(asked):
    assert given(asked, {"x"}, reasons=False) == {}
    (name,) = asked
    with pytest.raises(Invalid):
        given({name: "high" if name == "reasoning_effort" else True}, {"x"}, reasons=False)
