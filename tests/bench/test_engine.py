"""Rows of our engine on the burst agree with the work that the engine did."""

import json

import pytest

from bench.bound import Products
from bench.engine.__main__ import parse_options, run
from bench.peers.rows import write_rows

SMALL = ["--stack", "tiny", "--requests", "5", "--output-tokens", "3"]


def test_a_row_has_the_right_first_tokens_and_the_bound_of_its_own_steps(tmp_path, monkeypatch):
    asked = []
    seconds = Products.seconds
    monkeypatch.setattr(
        Products, "seconds", lambda self, steps: asked.append(list(steps)) or seconds(self, steps)
    )
    options = parse_options([*SMALL, "--only", "C", "--adapters", "16"])
    assert write_rows(run(options), tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["setup"]["precision"], row["setup"]["adapters"]) for row in rows] == [
        ("float32", 16),
        ("int8", 16),
        ("int4", 16),
    ]
    assert {row["bench"] for row in rows} == {"engine"}
    for row in rows:
        result = row["result"]
        assert (result["output_tokens"], result["errors"], result["valid"]) == (15, {}, True)
    assert rows[0]["result"]["first_token_match"] == 1.0
    assert rows[0]["result"]["bound"]["products_cpu_s"] > 0
    (steps,) = asked
    assert sum(rows for _, rows in steps) == 15
    num_prompt = sum(tokens for tokens, _ in steps) - 15 + 5  # first tokens come of prompts' steps
    assert 5 * 64 <= num_prompt <= 5 * 256


@pytest.mark.soak
def test_an_engine_of_two_threads_takes_turns_with_two_engines(capsys):
    few = ["--only", "C", "--precision", "int8", "--adapters", "1", "--threads", "2"]
    assert write_rows(run(parse_options([*SMALL, *few])), None)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["bench"], row["setup"]["threads"]) for row in rows] == [
        ("engine", 2),
        ("engine.threads", 2),
    ]
    assert rows[-1]["result"]["ratio"] > 0
