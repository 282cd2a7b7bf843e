"""Activated LoRA: the base model applies before the invocation tokens, the adapter from there."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import lists, sampled_from
from peft.tuners.lora.variants import calculate_alora_offsets

from engine.requests.request import find_adapter_start
from engine.steps.batch import ScheduledRow
from engine.steps.segments import find_firsts, find_segments
from lora.batch import DeviceTables
from tests.engine.fakes import (
    FakeLoader,
    expected_tokens,
    make_adapter,
    make_core,
    make_message,
    make_scheduler,
    run_until_idle,
    tokens_of,
)

INVOCATION = (201, 202, 203)
TEXT = [1 + i % 7 for i in range(70)]
ALORA, OTHER = make_adapter("activated"), make_adapter("another")


def start_in(message, invocation):
    return find_adapter_start(message.adapter, message.prompt_token_ids, invocation)


def make_alora_core(directory, invocation=INVOCATION, **limits):
    loader = FakeLoader()
    loader.invocation_tokens = {a.object_key: invocation for a in (ALORA, OTHER)}
    return make_core(directory, make_scheduler(loader=loader, **limits))


def served(core, message):
    """Run a request alone to its end and return its outputs."""
    core.handle("gw", message)
    return run_until_idle(core)[message.request_id]


def num_cached(core, name, prompt, adapter=None, **options):
    message = make_message(name, prompt=prompt, adapter=adapter, **options)
    return served(core, message)[-1].num_cached_tokens


# ---- the adapter's start ----


# The low byte of the last token is that of another, which a search by bytes would find.
few_tokens = sampled_from([0, 1, 2, 256])


@given(lists(few_tokens, min_size=1, max_size=20), lists(few_tokens, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_it_starts_where_peft_says(prompt, invocation):
    config = {"a": SimpleNamespace(alora_invocation_tokens=invocation)}
    (offset,) = calculate_alora_offsets(config, "a", torch.tensor([prompt]))
    start = None if offset is None else len(prompt) - offset
    assert start_in(make_message(prompt=prompt, adapter=ALORA), invocation) == start


def test_an_ordinary_adapter_applies_from_the_first_token_on():
    assert start_in(make_message(adapter=ALORA), None) == 0


# ---- shared KV ----


def test_what_the_base_computed_is_found_up_to_the_block_of_the_invocation(tmp_path):
    core = make_alora_core(tmp_path)
    prompt = [*TEXT[:40], *INVOCATION, *TEXT[:27]]
    assert num_cached(core, "base", prompt) == 0
    assert num_cached(core, "first", prompt, ALORA) == 32
    assert num_cached(core, "again", prompt, ALORA) == 64
    assert num_cached(core, "other", prompt, OTHER) == 32


def test_what_it_computed_before_its_invocation_is_found_by_the_base(tmp_path):
    core = make_alora_core(tmp_path)
    prompt = [*TEXT[:40], *INVOCATION, *TEXT[:27]]
    assert num_cached(core, "alora", prompt, ALORA) == 0
    assert num_cached(core, "base", prompt) == 32
    assert num_cached(core, "other", prompt, OTHER) == 32
    assert num_cached(core, "ordinary", prompt, make_adapter("ordinary")) == 0


def test_what_is_public_on_the_base_is_public_before_the_invocation(tmp_path):
    public = tuple(TEXT[:48])
    core = make_alora_core(tmp_path, public_prefixes=(public,))
    num_cached(core, "ours", [*public, 9], cache_salt="ours")
    prompt = [*public[:35], *INVOCATION, *public]
    assert num_cached(core, "theirs", prompt, ALORA, cache_salt="theirs") == 32


def test_an_invocation_at_the_very_start_leaves_nothing_to_share(tmp_path):
    core = make_alora_core(tmp_path)
    prompt = [*INVOCATION, *TEXT]
    assert num_cached(core, "base", prompt) == 0
    assert num_cached(core, "alora", prompt, ALORA) == 0
    assert num_cached(core, "again", prompt, ALORA) == 64


def test_an_invocation_that_is_generated_moves_nothing(tmp_path):
    """An adapter starts elsewhere if the same tokens are generated than if they are prompted."""
    first = next(
        message
        for message in (
            make_message("r1", prompt=[t, 99], adapter=ALORA, max_tokens=20) for t in range(1, 250)
        )
        if message.prompt_token_ids[0]
        in expected_tokens(message, None, message.prompt_token_ids[:1])[:9]
    )
    invocation = first.prompt_token_ids[:1]
    core = make_alora_core(tmp_path, invocation)
    history = [*first.prompt_token_ids, *tokens_of(served(core, first))]
    second = make_message("r2", prompt=history, adapter=ALORA)
    assert start_in(second, invocation) > 0
    output = served(core, second)
    assert tokens_of(output) == expected_tokens(second, None, invocation)
    assert output[-1].num_cached_tokens == 0


# ---- refusals ----


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_prompt_that_does_not_invoke_its_adapter_is_refused(tmp_path, n, prefix_caching):
    core = make_alora_core(tmp_path, prefix_caching=prefix_caching)
    messages = {
        "silent": make_message("silent", prompt=TEXT, adapter=ALORA, n=n),
        "split": make_message("split", prompt=[201, 202, 1, 203], adapter=ALORA),
        "invoked": make_message("invoked", prompt=[*TEXT, *INVOCATION], adapter=ALORA),
        "base": make_message("base", prompt=TEXT),
    }
    for message in messages.values():
        core.handle("gw", message)
    outputs = run_until_idle(core)
    for name in ("silent", "split"):
        final = outputs[name][-1]
        assert (final.finish_reason, final.stop_cause) == ("error", "adapter_not_invoked")
        assert final.is_last
        assert (final.num_prompt_tokens, final.num_completion_tokens) == (0, 0)
        assert "invocation" in final.error
    for name in ("invoked", "base"):
        invocation = INVOCATION if name == "invoked" else ()
        expected = expected_tokens(messages[name], invocation=invocation)
        assert tokens_of(outputs[name]) == expected


# ---- the step ----


def row(start, length, adapter_start, adapter="a"):
    tokens, named = (1,) * length, (adapter, adapter, 1)
    return ScheduledRow("r", tokens, start, (), *named, None, 0, 0, adapter_start=adapter_start)


def test_rows_of_one_adapter_are_one_segment_only_where_they_touch():
    no_tiles = torch.zeros(0), torch.zeros(0)
    placed = {name: (1, DeviceTables(name, "base-1", *no_tiles)) for name in "ab"}
    rows = [
        row(0, 3, 3, adapter=None), row(0, 10, 4), row(20, 1, 4), row(0, 8, 8), row(0, 8, 6),
        row(0, 2, 0, adapter="b"),
    ]  # fmt: skip
    firsts = find_firsts(rows)[:-1]
    segments, digests = find_segments(rows, firsts, placed.__getitem__, "base-1")
    found = [(each.start, each.end, each.tables.digest) for each in segments]
    assert found == [(7, 14, "a"), (28, 30, "a"), (30, 32, "b")]
    assert digests == {1: "a", 2: "a", 4: "a", 5: "b"}
