"""Outputs of a request are noted while they pass."""

from types import SimpleNamespace
from typing import Any

from engine.messages import RequestOutput
from server.inference.progress import Progress


def test_a_gap_is_told_with_the_tokens_that_ended_it_and_is_one_answers() -> None:
    running = SimpleNamespace(begun={0, 1}, has_begun=True)
    admitted: Any = SimpleNamespace(running=running)
    gaps: list[tuple[float, int]] = []
    passed: list[RequestOutput] = []
    progress = Progress(admitted, passed.append, lambda *_: None, lambda *gap: gaps.append(gap))
    said = [((5,), 0), ((6, 7, 8), 0), ((5,), 1), ((), 0), ((9,), 0), ((6,), 1)]
    for seq, (token_ids, index) in enumerate(said):
        progress.note(RequestOutput("r", seq, index, token_ids))
    assert [count for _, count in gaps] == [3, 1, 1], "an answer's first tokens end no gap"
    assert all(seconds >= 0 for seconds, _ in gaps)
    assert len(passed) == len(said)
