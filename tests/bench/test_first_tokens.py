"""The reference tells answers of the right adapter from all others, and rows show which it was."""

import math
from dataclasses import replace

import pytest

from bench.checkpoint import Checkpoint, make_checkpoint
from bench.first_tokens import FirstTokens
from bench.multi_lora import Burst, burst_result
from bench.outcome import Outcome
from bench.peft_generate import PeftPeer
from bench.workload import BenchRequest, Lengths

BURST = Burst(
    stack="tiny", num_requests=7, prompt_tokens=Lengths(3, 33), output_tokens=Lengths(5, 5)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(BURST.stack, tmp_path_factory.mktemp("bench"), num_adapters=7)


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> FirstTokens:
    return FirstTokens(checkpoint, threads=1)


@pytest.fixture(scope="module")
def mixed(checkpoint: Checkpoint) -> list[BenchRequest]:
    return BURST.requests(checkpoint, num_adapters=7)


def match(outcomes: list[Outcome], likely: list[list[int]]) -> tuple[float, float]:
    result = burst_result(outcomes, cpu_s=1.0, peak_rss_mb=1.0, likely=likely)
    return result["first_token_match"], result["first_token_near"]


def test_a_batch_of_all_adapters_says_what_each_says_alone(checkpoint, reference, mixed) -> None:
    outcomes = PeftPeer(checkpoint, threads=1).run(mixed, max_batch=7)
    assert match(outcomes, reference.likely(mixed)) == (1.0, 1.0)


@pytest.mark.parametrize("others", ["base", "swapped"])
def test_adapters_that_are_dropped_or_swapped_are_seen(
    checkpoint, reference, mixed, others: str
) -> None:
    names = [checkpoint.base_model] * 7
    if others == "swapped":
        names = [request.model for request in (*mixed[1:], mixed[0])]
    asked = [replace(request, model=name) for request, name in zip(mixed, names, strict=True)]
    outcomes = PeftPeer(checkpoint, threads=1).run(asked, max_batch=7)
    assert max(match(outcomes, reference.likely(mixed))) < 0.5


def test_adapters_matter_where_the_base_says_something_else(checkpoint, reference, mixed) -> None:
    base = BURST.requests(checkpoint, num_adapters=0)
    assert reference.adapters_matter(base) == 0.0
    alone = zip(reference.likely(mixed), reference.likely(base), strict=True)
    assert reference.adapters_matter(mixed) == sum(a[0] != b[0] for a, b in alone) / 7 > 0.5


def make_outcome(index: int, chunk_s: tuple[float, ...], error: str | None = None) -> Outcome:
    return Outcome(
        index=index,
        model="base",
        num_prompt_tokens=9,
        due_s=0.0,
        sent_s=0.0,
        end_s=chunk_s[-1],
        chunk_s=chunk_s,
        token_ids=(index, *chunk_s[1:]),
        error=error,
    )


def test_a_result_counts_the_tokens_of_good_answers_over_processor_time_and_over_the_run() -> None:
    outcomes = [
        make_outcome(0, (1.0, 1.5, 2.0)),
        make_outcome(1, (3.0, 3.25, 3.5)),
        make_outcome(2, (4.0, 6.0), error="wrong_length"),
    ]
    result = burst_result(outcomes, cpu_s=2.0, peak_rss_mb=63.4, likely=[[0, 5], [7, 1], [2, 9]])
    assert result["output_tokens"] == 6
    assert result["output_tokens_per_cpu_s"] == 3.0
    assert result["output_tokens_per_s"] == 1.0
    assert result["ttft_ms"] == {"p50": 2000.0, "max": 3000.0}
    assert result["tpot_ms"] == 375.0
    assert result["peak_rss_mb"] == 63
    assert result["errors"] == {"wrong_length": 1}
    assert math.isclose(result["first_token_match"], 2 / 3, rel_tol=1e-3)
    assert result["first_token_near"] == 1.0


def test_a_result_without_a_good_answer_has_no_latency() -> None:
    result = burst_result([make_outcome(0, (1.0,), error="500")], 1.0, 1.0, [[7]])
    assert result["ttft_ms"] == {}
    assert result["tpot_ms"] is None
    assert result["output_tokens_per_cpu_s"] == 0.0
