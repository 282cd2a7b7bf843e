"""The burst asks the same prompts whatever the number of adapters, and each adapter equally."""

from collections import Counter
from pathlib import Path

import pytest

from bench.checkpoint import Checkpoint
from bench.multi_lora import NUM_ADAPTERS, Burst

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
