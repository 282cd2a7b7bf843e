"""Answers with drafts and without are the same, and the rows say how fast each was."""

import json

import pytest

from bench.speculation.__main__ import parse_options, run
from tests import needs


@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_compares_both_ways_of_the_same_requests(batch):
    needs.smollm2()
    arguments = f"--kinds extraction --batches {batch} --output-tokens 9 --turns 1"
    [(bench, setup, result)] = run(parse_options(arguments.split()))
    assert (bench, setup["batch"]) == ("speculation", batch)
    json.dumps(result)
    assert result["valid"]
    assert result["speedup"] > 0
    assert 0 <= result["acceptance"] <= 1
    assert result["drafted"] > 0
