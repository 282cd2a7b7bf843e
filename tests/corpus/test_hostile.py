"""Configs and files that are made to cost time or to be misread end in an answer with a reason."""

import io
import re

import pytest

from registry.checks.validate import AdapterLimits
from registry.errors import InvalidAdapter
from registry.formats.peft_config import MAX_CONFIG_BYTES
from tests.registry.factories import encode, make_adapter, make_base, make_config, validate_adapter

LIMITS = AdapterLimits()
EXPRESSIONS = {
    "nested repeats": "(([a-z_.]+)*)*x",
    "alternations that agree": "(model|mode.|mod..|.*)*x",
    "alternations in number": "|".join(f".*{n}.*x" for n in range(6000)),
    "repeats in number": ".*" * 20_000 + "x",
    "counts of counts": "((.{30}){30}){30}x",
    "a reference": r"(.*)\1\1\1x",
    "lookahead in repeats": "(?:(?=(.*)).)*x",
}
"""Expressions that match no module's name; engines that backtrack need years to say so."""


def as_value(key, expression):
    if key.endswith("_pattern") and key != "layers_pattern":
        return {expression: 2}
    return [expression] if key == "layers_pattern" else expression


def answer(config, base):
    """The passport's warnings, or the error."""
    try:
        passport = validate_adapter(config, io.BytesIO(encode(make_adapter(base))), base, LIMITS)
    except InvalidAdapter as error:
        return str(error)
    return "\n".join(passport.warnings)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "key",
    ["target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"],
)
@pytest.mark.parametrize("kind", EXPRESSIONS)
@pytest.mark.timeout(30)
def test_a_hostile_expression_is_told_in_any_key(base, key, kind):
    values = {key: as_value(key, EXPRESSIONS[kind])}
    if key == "layers_pattern":
        values["layers_to_transform"] = [0]
    config = make_config(**values)
    assert len(config) < MAX_CONFIG_BYTES
    told = answer(config, base)
    # An expression that excludes nothing is as good as none.
    assert key == "exclude_modules" or re.search(
        rf"{key} .*(not matched|no regular expression|linear time)|does not target|has no tensors"
        "|matches no module", told,
    )  # fmt: skip


def test_many_hostile_expressions_in_one_config_are_told(base):
    patterns = {f"({'(a|b|ab)*' * 2}){n}x": 2 for n in range(600)}
    config = make_config(rank_pattern=patterns, alpha_pattern=patterns)
    assert len(config) < MAX_CONFIG_BYTES
    assert "rank_pattern has" in answer(config, base)
