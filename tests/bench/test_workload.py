"""Requests of a benchmark are decided by the seed and have the shape that was asked for."""

import dataclasses
from collections import Counter

import pytest

from bench.workload import POPULARITIES, BenchRequest, Lengths, Workload, make_requests

MODELS = tuple(f"m{number}" for number in range(7))


def make_workload(**changes: object) -> Workload:
    plain = Workload(
        base_model="base",
        models=MODELS,
        popularity="uniform",
        rate=float("inf"),
        num_requests=133,
        prompt_tokens=Lengths(3, 9),
        output_tokens=Lengths(5, 5),
        vocab_size=63,
    )
    return dataclasses.replace(plain, **changes)


def models_of(requests: list[BenchRequest]) -> list[str]:
    return [request.model for request in requests]


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_the_same_seed_sends_the_same_requests(popularity: str) -> None:
    workload = make_workload(popularity=popularity, rate=3.0)
    assert make_requests(workload) == make_requests(workload)


def test_the_rate_changes_when_requests_are_sent_and_nothing_else() -> None:
    burst, open_loop = (make_requests(make_workload(rate=rate)) for rate in (float("inf"), 2.0))
    assert burst == [dataclasses.replace(request, due_s=0.0) for request in open_loop]
    assert open_loop[-1].due_s > 0


def test_arrivals_are_poisson_at_the_rate_asked() -> None:
    due_s = [r.due_s for r in make_requests(make_workload(rate=4.0, num_requests=4001))]
    gaps = [b - a for a, b in zip(due_s, due_s[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert due_s[0] == 0.0
    assert min(gaps) >= 0.0
    assert mean == pytest.approx(1 / 4.0, rel=0.1)
    # An exponential's deviation equals its mean; evenly spaced requests have no deviation.
    assert variance**0.5 == pytest.approx(mean, rel=0.1)


def test_lengths_and_ids_stay_in_their_ranges_and_reach_both_ends() -> None:
    requests = make_requests(make_workload())
    assert {len(request.prompt_token_ids) for request in requests} == set(range(3, 10))
    assert {request.max_tokens for request in requests} == {5}
    assert {token for r in requests for token in r.prompt_token_ids} == set(range(63))


def test_zipf_asks_the_first_adapter_most_and_the_next_by_the_power_law() -> None:
    requests = make_requests(make_workload(popularity="zipf", num_requests=20_000))
    counts = Counter(models_of(requests))
    assert [name for name, _ in counts.most_common()] == list(MODELS)
    assert counts["m0"] / counts["m1"] == pytest.approx(2**1.5, rel=0.1)
