"""A row summarizes outcomes: percentiles, rates, shares, errors."""

from bench.outcome import Outcome
from bench.report import summarize


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


def test_failed_requests_are_counted_by_code_and_their_tokens_are_not() -> None:
    failed = make_outcome(1, error="503 overloaded", chunk_s=(), token_ids=())
    result = summarize([make_outcome(0), failed], "base")
    assert result["errors"] == {"503 overloaded": 1}
    assert result["requests"] == 2
    assert result["output_tokens"] == 3
