import pytest

from registry.errors import InvalidAdapter
from registry.module_pattern import ModulePattern

Q0 = "model.layers.0.self_attn.q_proj"
UP11 = "model.layers.11.mlp.up_proj"


def pattern(text):
    return ModulePattern(text, param="rank_pattern")


@pytest.mark.parametrize(
    ("text", "matching", "other"),
    [
        ("q_proj", Q0, UP11),
        ("self_attn.q_proj", Q0, UP11),
        (Q0, Q0, UP11),
        ("^model.layers.0.self_attn.q_proj", Q0, UP11),
        (r"layers\.\d+\.mlp\.up_proj", UP11, Q0),
        (r".*\.(up|down)_proj", UP11, Q0),
        ("(q_proj|k_proj)", Q0, UP11),
        (r"layers\.1[0-5]\..*", UP11, Q0),
        (r"(?:q|k)_proj$", Q0, UP11),
    ],
)
def test_a_suffix_matches_as_in_peft(text, matching, other):
    from peft.utils.other import get_pattern_key

    for module, expected in ((matching, True), (other, False)):
        assert pattern(text).matches_suffix(module) is expected
        # PEFT answers with the key that matched, or with the module itself.
        assert (get_pattern_key([text], module) == text) is expected


def test_a_suffix_begins_at_a_dot():
    assert not pattern("proj").matches_suffix(Q0)


def test_a_whole_pattern_must_match_from_end_to_end():
    assert pattern(r".*\.q_proj").matches_whole(Q0)
    assert not pattern("q_proj").matches_whole(Q0)


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+",
        "(a|a)*",
        "(.|.)" * 20,
        "(|)" * 20,
        ".*.*.*.*x",
        "a**",
        "a*+",
        r"(.)\1",
        "(?=a)",
        "(?P<n>a)",
        "(?i)a",
        "a{1000000}",
        "a{99}{99}",
        "(a",
        "a)",
        "[z-a]",
        "[[a]",
        "é",
        "a b",
        "\\",
        "a|" * 300_000,
    ],
)
def test_a_pattern_that_could_stall_us_or_is_none_is_refused(text):
    with pytest.raises(InvalidAdapter) as caught:
        pattern(text)
    assert caught.value.code == "unsupported_pattern"
    assert caught.value.param == "rank_pattern"


@pytest.mark.parametrize("text", [".*.*.*x", "(.|.)" * 17 + "x", ".*.*" + "(.|.)" * 6 + "x"])
@pytest.mark.timeout(30)  # a pattern that backtracks would take hours
def test_the_worst_pattern_that_is_accepted_ends(text):
    assert not pattern(text).matches_suffix("model.layers.111.self_attn.q_proj")
