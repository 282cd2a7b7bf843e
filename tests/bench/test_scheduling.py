"""Each scheduling experiment at a tiny size: it gives figures, and ratios fit the figures."""

import json

import pytest

from bench.experiment import replace_rows, row
from bench.outcome import Outcome
from bench.scheduling.__main__ import EXPERIMENTS
from bench.scheduling.chunked_prefill import ChunkedPrefill, gaps_between
from bench.scheduling.fairness import Fairness, backlogged_until_s, service
from bench.scheduling.overhead import Overhead
from bench.scheduling.preemption import Preemption
from bench.scheduling.prefix_cache import PrefixCache


def measure(experiment):
    return json.loads(row("scheduling.test", experiment))


def make_outcome(*chunk_s: float, prompt: int = 7) -> Outcome:
    return Outcome(
        index=0,
        model="base",
        num_prompt_tokens=prompt,
        due_s=0.0,
        sent_s=0.0,
        end_s=chunk_s[-1],
        chunk_s=chunk_s,
        token_ids=(1,) * len(chunk_s),
    )


def test_a_row_says_what_was_measured_and_where() -> None:
    line = measure(PrefixCache(stack="tiny", requests=3, shared_tokens=48))
    assert line["setup"]["stack"] == "tiny"
    assert line["setup"]["shared_tokens"] == 48
    assert (line["setup"]["threads"], line["setup"]["dtype"]) == (1, "float32")


def test_a_hit_is_compared_with_the_miss_and_with_no_cache_at_all() -> None:
    result = measure(PrefixCache(stack="tiny", requests=5, requests_without=2))["result"]
    hit_ms = result["hit_ttft_ms"]["p50"]
    assert result["hit_to_miss"] == pytest.approx(hit_ms / result["miss_ttft_ms"], rel=1e-2)
    without_ms = result["without_cache_ttft_ms"]["p50"]
    assert result["hit_to_without_cache"] == pytest.approx(hit_ms / without_ms, rel=1e-2)


def test_a_long_prompt_is_chunked_or_whole() -> None:
    small = {"max_model_len": 512, "arena_tokens": 1024, "whole_tokens": 512, "tail_tokens": 20}
    result = measure(ChunkedPrefill(stack="tiny", streams=2, prompt_tokens=400, **small))["result"]
    assert result["chunked"]["max_num_batched_tokens"] == 128
    assert result["whole"]["max_num_batched_tokens"] == 512
    p99_ms = [result[name]["itl_ms"]["p99"] for name in ("chunked", "whole")]
    assert result["chunked_to_whole"]["itl_p99"] == pytest.approx(p99_ms[0] / p99_ms[1], rel=1e-2)


def test_gaps_belong_to_the_interval_in_which_they_end() -> None:
    outcomes = [make_outcome(1.0, 2.0, 4.0), make_outcome(1.5, 3.0)]
    assert gaps_between(outcomes, 2.0, 3.5) == [1.5]
    assert gaps_between(outcomes, 0.0, 9.0) == [1.0, 2.0, 1.5]


def test_service_is_shared_equally_by_vtc_and_by_load_by_fcfs() -> None:
    result = measure(Fairness(stack="tiny", small_requests=12, output_tokens=(4, 12)))["result"]
    assert result["vtc"]["service_large_to_small"] == pytest.approx(1.0, abs=0.3)
    assert result["fcfs"]["service_large_to_small"] == pytest.approx(10.0, abs=3.0)


def test_service_counts_prompts_once_and_generated_tokens_twice() -> None:
    outcomes = [make_outcome(1.0, 2.0, 3.0, prompt=10), make_outcome(4.0, prompt=100)]
    assert service(outcomes, 2.0) == 10 + 2 * 2
    assert service(outcomes, 4.0) == 10 + 2 * 3 + 100 + 2 * 1
    assert backlogged_until_s(outcomes) == 4.0


def test_the_arena_is_small_enough_to_preempt() -> None:
    small = {"requests": 5, "repeats": 2, "prompt_tokens": 63, "output_tokens": 40}
    arena = {"max_model_len": 128, "arena_tokens": 256}
    result = measure(Preemption(stack="tiny", **small, **arena))["result"]
    assert result["swap"]["preemptions"] > 0
    assert result["recompute"]["preemptions"] > 0
    assert result["recompute"]["swapped"] == 0
    speeds = [result[name]["output_tokens_per_s"] for name in ("swap", "recompute")]
    assert result["swap_to_recompute"] == pytest.approx(speeds[0] / speeds[1], rel=1e-2)


def test_a_row_takes_the_place_of_the_one_before_it(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    cases = (("a", 0), ("b", 0), ("a", 1))
    old, other, new = (json.dumps({"bench": name, "n": n}) + "\n" for name, n in cases)
    replace_rows(path, [old, other])
    replace_rows(path, [new])
    assert path.read_text() == other + new


def test_every_experiment_measures_a_stack_that_there_is() -> None:
    assert {e.stack for e in EXPERIMENTS.values()} <= {"smollm2-135m", "small-5m"}


def test_a_step_without_a_model_is_measured_with_and_without_a_queue() -> None:
    small = {
        "stack": "tiny",
        "running": (4,),
        "waiting": 9,
        "steps": 5,
        "prompt_tokens": 20,
        "arena_tokens": 4096,
    }
    figures = measure(Overhead(**small))["result"]["running_4"]
    p50_ms = [figures[name]["p50"] for name in ("step_ms_with_waiting", "step_ms")]
    assert figures["with_waiting_to_without"] == pytest.approx(p50_ms[0] / p50_ms[1], rel=1e-2)
