"""Outputs of a request are noted while they pass."""

from types import SimpleNamespace
from typing import Any

from engine.wire.messages import RequestOutput
from server.inference.progress import Progress
from server.inference.request_metrics import RequestMetrics


def test_a_gap_is_told_with_the_tokens_that_ended_it_and_is_one_answers() -> None:
    running = SimpleNamespace(begun={0, 1}, has_begun=True)
    ticket: Any = SimpleNamespace(running=running, base=SimpleNamespace(model_id="base"))
    metrics = RequestMetrics()
    passed: list[RequestOutput] = []
    progress = Progress(ticket, passed.append, metrics)
    said = [((5,), 0), ((6, 7, 8), 0), ((5,), 1), ((), 0), ((9,), 0), ((6,), 1)]
    counts = []
    for seq, (token_ids, index) in enumerate(said):
        progress.note(RequestOutput("r", seq, index, token_ids))
        counts.append(num_gaps(metrics))
    assert counts == [0, 3, 3, 3, 4, 5], "an answer's first tokens end no gap"
    assert len(passed) == len(said)


def num_gaps(metrics: RequestMetrics) -> float:
    """The times from token to token that the metrics have, of all sizes."""
    samples = [sample for family in metrics.collect() for sample in family.samples]
    return sum(s.value for s in samples if s.name == "chorale_inter_token_latency_seconds_count")
