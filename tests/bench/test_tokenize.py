import json

import pytest

from bench import tokenize
from bench.tokenizer_families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_times_of_both(family):
    row = json.loads(tokenize.row(family, num_characters=500, repeats=2))
    assert row["bench"] == "tokenize"
    assert row["setup"]["family"] == family
    assert 0 < row["result"]["tokens"] < 500
    assert row["result"]["hugging_face_ms"].keys() == row["result"]["ours_ms"].keys()


@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_prose_has_the_size_that_was_asked_for(size):
    assert len(tokenize.prose(size)) == size
