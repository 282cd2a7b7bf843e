"""The official test suite of JSON Schema: what a schema forbids, its grammar does not accept."""

import json
from collections import Counter
from functools import partial

import pytest

from server.faults import Invalid
from tests import needs
from tests.server.shapes.test_grammar import accepts, make


@pytest.mark.soak  # pip needs half a minute for the sources
def test_a_schema_that_is_taken_lets_no_instance_in_that_the_suite_forbids(tmp_path):
    counts, wrong = Counter(), set()
    for path in needs.schema_suite(tmp_path).rglob("*.json"):
        for case in json.loads(path.read_text()):
            counts["schemas"] += 1
            try:
                grammar = make("json", case["schema"])
            except Invalid:
                continue
            counts["taken"] += 1
            for test in case["tests"]:
                compact = partial(json.dumps, test["data"], separators=(",", ":"))
                texts = compact(), compact(ensure_ascii=False)
                is_accepted = any(accepts(grammar, text) for text in texts)
                counts["valid" if test["valid"] else "invalid", is_accepted] += 1
                if is_accepted and not test["valid"]:
                    wrong.add(test["description"])
    print(dict(counts))  # noqa: T201
    assert counts["taken"] > 150
    assert counts["invalid", False] > 350
    assert counts["valid", True] > 0.9 * (counts["valid", True] + counts["valid", False])
    assert wrong == set()
