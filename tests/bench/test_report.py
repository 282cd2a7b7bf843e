"""A row summarizes outcomes: percentiles, rates, shares, errors."""

import json

import pytest

from bench.outcome import Outcome
from bench.report import json_line, match_share, percentiles_ms, summarize


def make_outcome(index: int = 0, **changes: object) -> Outcome:
    """Make an outcome: due at 1 s, sent a little late, three tokens, done at 3 s."""
    plain = {
        "index": index,
        "model": "a",
        "num_prompt_tokens": 7,
        "due_s": 1.0,
        "sent_s": 1.25,
        "end_s": 3.0,
        "chunk_s": (2.0, 2.5, 3.0),
        "token_ids": (4, 5, 6),
    }
    return Outcome(**(plain | changes))


def test_latency_counts_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    result = summarize([make_outcome()], "base")
    assert result["ttft_ms"]["p50"] == 1000.0
    assert result["e2e_ms"]["p50"] == 2000.0
    assert result["scheduler_lag_ms_p99"] == 250.0


def test_the_gaps_between_chunks_are_the_inter_token_latency() -> None:
    assert summarize([make_outcome(chunk_s=(2.0, 2.1, 2.9))], "base")["itl_ms"]["p50"] == 450.0


def test_throughput_is_over_the_whole_run() -> None:
    result = summarize([make_outcome(0), make_outcome(1, end_s=6.0)], "base")
    assert result["duration_s"] == 6.0
    assert result["output_tokens_per_s"] == 1.0
    assert result["total_tokens_per_s"] == pytest.approx(20 / 6, rel=1e-3)


def test_failed_requests_are_counted_by_code_and_their_tokens_are_not() -> None:
    failed = make_outcome(1, error="503 overloaded", chunk_s=(), token_ids=())
    result = summarize([make_outcome(0), failed], "base")
    assert result["errors"] == {"503 overloaded": 1}
    assert result["requests"] == 2
    assert result["output_tokens"] == 3


def test_a_run_that_failed_whole_still_makes_a_row() -> None:
    result = summarize([make_outcome(error="ConnectError", chunk_s=(), token_ids=())], "base")
    assert result["ttft_ms"] == {"p50": None, "p99": None}
    assert result["output_tokens_per_s"] == 0.0


def test_the_base_model_is_no_adapter() -> None:
    outcomes = [make_outcome(i, model=model) for i, model in enumerate(("base", "a", "b", "a"))]
    assert summarize(outcomes, "base")["adapters_hit"] == 2


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentiles_ms(n / 1000 for n in range(1, 102)) == {"p50": 51.0, "p99": 100.0}


def test_only_equal_answers_match() -> None:
    ours = [make_outcome(0), make_outcome(1), make_outcome(2), make_outcome(3)]
    theirs = [make_outcome(0), make_outcome(1, token_ids=(4, 5, 9)), *ours[2:]]
    assert match_share(ours, theirs) == 0.75


def test_a_row_is_one_line_of_json_that_says_where_it_was_measured() -> None:
    line = json_line("serve", "2 vCPU Test", {"rate": "inf"}, {"requests": 1})
    row = json.loads(line)
    assert "\n" not in line
    assert list(row) == ["bench", "commit", "device", "torch", "setup", "result"]
    assert row["device"] == "2 vCPU Test"
