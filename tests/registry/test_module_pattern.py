import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import InvalidAdapter
from registry.formats.module_pattern import SUFFIX, WHOLE, read_pattern
from tests.refusals import refused

Q0 = "model.layers.0.self_attn.q_proj"
UP11 = "model.layers.11.mlp.up_proj"
VISION = "model.visual.blocks.3.attn.qkv"


def pattern(text, form=SUFFIX):
    found = read_pattern(text, "rank_pattern", form)
    assert found is not None
    return found


def test_a_suffix_begins_at_a_dot():
    assert not pattern("proj").matches(Q0)


PIECES = (
    ".", ".*", ".*?", r"\.", r"\d+", r"\b", r"[\d]{1,}", "layers", "(q_proj|up_proj)", "^", "$",
    "(?:self_attn|mlp)", "model", "[a-z_]+", "_proj", "(?i)", "x{2}", "x{,2}", "(", ")", "|",
    "[^.]", "[[:alpha:]]", r"\w", "(?!x)", r"\1", "(?=q)", r"\Z", "?", "+",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.sampled_from((WHOLE, SUFFIX)))
def test_what_is_compared_means_what_it_means_to_python(text, form):
    try:
        found = read_pattern(text, "target_modules", form)
    except InvalidAdapter:
        found = None
    if found is not None:
        python = re.compile(form.format(text))
        for module in (Q0, UP11, VISION, "lm_head"):
            match = python.fullmatch(module) if form == WHOLE else python.match(module)
            assert found.matches(module) is bool(match), text


def test_a_flag_may_begin_a_pattern_of_whole_names():
    assert pattern(r"(?i).*\.Q_PROJ", WHOLE).matches(Q0)
    with pytest.raises(InvalidAdapter):  # as in PEFT, whose form has it in the middle
        pattern("(?i)Q_PROJ")


@pytest.mark.parametrize(
    "text", [r"(.)\1", "(?=a)", "(?!a)", "a(?<=a)", "x{,2}", "[[:a]", "a{9999}", "a\ud800"]
)
def test_a_pattern_that_is_not_matched_in_linear_time_is_none(text):
    assert read_pattern(text, "rank_pattern") is None


@pytest.mark.parametrize(
    "text", ["a**", "(a", "a)", "[z-a]", "\\", "(" * 5000 + ")" * 5000, "a{99999999999}"]
)
def test_a_pattern_that_is_none_is_refused(text):
    with refused("unsupported_pattern", param="rank_pattern"):
        read_pattern(text, "rank_pattern")


def test_patterns_are_equal_by_their_text():
    assert pattern("a.*") == pattern("a.*") != pattern("a")


def test_a_pattern_that_matches_without_its_number_names_no_layer():
    found = pattern(r"model|layers\.(?P<layer>\d+)", WHOLE)
    assert (found.layer("model.x"), found.layer("layers.7.x")) == (None, 7)
