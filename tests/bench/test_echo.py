import json

from bench import echo

SETUP = {"stack": "tiny", "prompt_tokens": 40, "step_tokens": 16, "repeats": 1}


def test_a_row_compares_a_prompt_whose_tokens_are_scored_with_one_whose_are_not():
    row = json.loads(echo.row(**SETUP))
    assert row["setup"] == SETUP
    plain, scored = row["result"]["plain"], row["result"]["scored"]
    assert (plain["num_scored"], scored["num_scored"]) == (0, 39)
    assert row["result"]["cpu_ratio"] > 0
