"""The official test suite of JSON Schema: what a schema forbids, its grammar does not accept; and
what it allows, the grammar of its enforceable part does accept.
"""

import json
from collections import Counter
from functools import partial
from math import inf

import pytest

from registry.errors import Invalid
from server.constraints.grammar import enforceable_schema
from tests import needs
from tests.server.constraints.test_grammar import accepts, make


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


NEVER_ACCEPTED = {
    # No answer has control characters, and properties come in the schema's order.
    "match string with nul", "matches", "with no unevaluated properties",
    # Its dialect is one in which `minimum` demands nothing.
    "no validation: invalid number, but it still validates",
}  # fmt: skip


@pytest.mark.soak
def test_the_enforceable_part_of_a_schema_lets_every_instance_in_that_the_suite_allows(tmp_path):
    counts, refused = Counter(), set()
    for path in needs.schema_suite(tmp_path).rglob("*.json"):
        for case in json.loads(path.read_text()):
            kept, left_out = enforceable_schema(case["schema"], "s", inf)
            if left_out in ([], ["s"]):
                continue
            counts["in part"] += 1
            grammar = json.dumps({"grammars": [{"json_schema": kept}]})
            for test in case["tests"]:
                texts = json.dumps(test["data"]), json.dumps(test["data"], ensure_ascii=False)
                is_accepted = any(accepts(grammar, text) for text in texts)
                counts[test["valid"], is_accepted] += 1
                if test["valid"] and not is_accepted:
                    refused.add(test["description"])
    assert counts["in part"] > 200
    assert counts[True, True] > 500
    assert refused == NEVER_ACCEPTED
