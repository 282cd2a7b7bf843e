"""Documents give the same durations of targets as the Makefile."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_DURATION = r"\d+ (?:minutes?|seconds)"
SAID = dict(
    re.findall(rf"^([a-z-]+):.*## .*\bin ({_DURATION})", (ROOT / "Makefile").read_text(), re.M)
)
"""Durations by target, as `make help` shows them."""


def test_the_makefile_says_how_long_the_tests_take() -> None:
    assert SAID.keys() >= {"test", "test-fast", "test-all", "test-ray", "test-clients"}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_a_document_says_the_same(document: str) -> None:
    text = (ROOT / document).read_text()
    found = re.findall(rf"make ([a-z-]+)\b(?!`?,).*\b({_DURATION})", text)
    assert {target: duration for target, duration in found if target in SAID}
    assert [it for it in found if it[1] != SAID.get(it[0], it[1])] == []
