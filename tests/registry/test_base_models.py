"""The base model that takes the requests for a version, among those that are served."""

from dataclasses import dataclass

import pytest

from registry.base.base_models import BaseModels
from registry.ref import BaseRef


@dataclass(frozen=True)
class Served:
    model_id: str
    base_revision: str = "weights"
    variant: str = "plain"


FIRST, SECOND = Served("first"), Served("second", variant="other template")
INT8 = Served("int8", variant="int8")
CASES = {
    "the one that it names": ([FIRST, SECOND], BaseRef("weights", "second", "other template"), 1),
    "the named one with a new template": ([FIRST, SECOND], BaseRef("weights", "second", "old"), 1),
    "the one that it names before an equal one": (
        [Served("equal"), FIRST], BaseRef("weights", "first", "plain"), 1,
    ),
    "the same under another name": ([INT8, FIRST], BaseRef("weights", "renamed", "plain"), 1),
    "none in another precision": ([INT8], BaseRef("weights", "first", "plain"), None),
    "none of the name with other weights": (
        [Served("first", "new weights", "new")], BaseRef("weights", "first", "plain"), None,
    ),
    "none of another revision": ([FIRST], BaseRef("others", "first", "plain"), None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_version_is_served_by(case):
    served, ref, place = CASES[case]
    assert BaseModels(*served).serving(ref) is (None if place is None else served[place])
