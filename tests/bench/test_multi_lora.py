"""The burst asks the same prompts whatever the number of adapters, and each adapter equally."""

from collections import Counter
from pathlib import Path

import pytest

from bench.checkpoint import Checkpoint
from bench.multi_lora import NUM_ADAPTERS, Burst, burst_result
from bench.outcome import Outcome

CHECKPOINT = Checkpoint(Path("base"), {f"a{i}": Path(f"a{i}") for i in range(32)}, vocab_size=63)


@pytest.mark.parametrize("num_adapters", NUM_ADAPTERS[1:])
def test_every_adapter_is_asked_equally_often(num_adapters: int) -> None:
    models = Counter(r.model for r in Burst().requests(CHECKPOINT, num_adapters))
    assert models == dict.fromkeys(list(CHECKPOINT.adapters)[:num_adapters], 32 // num_adapters)


def test_without_adapters_the_base_is_asked() -> None:
    assert {r.model for r in Burst().requests(CHECKPOINT, 0)} == {"base"}


def test_only_the_models_differ_between_the_variants() -> None:
    asked = [
        [(r.prompt_token_ids, r.max_tokens, r.due_s) for r in Burst().requests(CHECKPOINT, number)]
        for number in NUM_ADAPTERS
    ]
    assert asked.count(asked[0]) == len(NUM_ADAPTERS)
    assert all(64 <= len(prompt) <= 256 and due_s == 0 for prompt, _, due_s in asked[0])


def test_a_decode_step_is_measured_only_while_all_requests_decode() -> None:
    """One request starts at 1 s, the other ends at 3.5 s: gaps are 1 s while both decode."""
    early = _outcome(0, (-10.0, -1.0, 1.0, 2.0, 3.0, 3.5))
    late = _outcome(1, (1.0, 2.0, 3.0, 12.0))
    result = burst_result([early, late], 1.0, 1.0, [[7], [7]])
    assert result["decode_step_ms"] == 1000
    apart = [_outcome(0, (0.0, 1.0)), _outcome(1, (1.5, 2.5))]
    assert burst_result(apart, 1.0, 1.0, [[7], [7]])["decode_step_ms"] is None


def _outcome(index: int, chunk_s: tuple[float, ...]) -> Outcome:
    tokens = (7,) * len(chunk_s)
    return Outcome(
        index=index, model="base", num_prompt_tokens=3, due_s=0.0, sent_s=0.0,
        end_s=chunk_s[-1], chunk_s=chunk_s, token_ids=tokens,
    )  # fmt: skip
