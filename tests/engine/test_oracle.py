"""A request gets the tokens that it gets alone with a merged adapter, whatever happens around it.

Chunks, preemption by recomputation and by swap, prefix hits, several answers, drafts and aborts
occur at once, for every model family, with ordinary and activated adapters. The references are
transformers and PEFT.
"""

import random
from functools import cache, partial
from itertools import product

import pytest

from tests.engine import runners
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message, tokens_of
from tests.engine.gpu.backends import fake_backend
from tests.engine.real_core import add_adapter, build_core
from tests.engine.replay_drafter import ReplayDrafter
from tests.oracle import greedy, merged_model
from tests.quantized_models import save_quantized
from tests.tiny_models import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    MIXTRAL,
    OLMO2,
    PHI3,
    QWEN3_MOE,
    save_adapter,
    save_model,
)

FAMILIES = {
    "llama": {},
    "mistral": {"family": "mistral", "sliding_window": 24},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "granite": {"family": "granite", **GRANITE},
    "olmo2": {"family": "olmo2", **OLMO2},
    "gemma2": {"family": "gemma2", **GEMMA2},
    "gemma3": {"family": "gemma3_text", **GEMMA3},
    "phi3": {"family": "phi3", "sliding_window": 40, **PHI3},
    "qwen3_moe": {"family": "qwen3_moe", **QWEN3_MOE},
    "mixtral": {"family": "mixtral", "sliding_window": 40, **MIXTRAL},
}
INVOCATION = [17, 18, 19]
NUM_TOKENS = 14
NUM_REQUESTS = 24


def make_requests(chance, adapters):
    """Requests of one tenant whose prompts share two prefixes; every fifth wants three answers.

    All prompts hold the tokens that invoke an activated LoRA, many of them twice.
    """
    stems = [[chance.randrange(1, 250) for _ in range(48)] for _ in range(2)]
    stems[0][3:6] = INVOCATION
    return [
        make_message(
            f"r{i}",
            prompt=[
                *stems[i % 2][: chance.randrange(49)],
                *INVOCATION,
                *[chance.randrange(1, 250) for _ in range(chance.randrange(1, 30))],
            ],
            max_tokens=NUM_TOKENS,
            adapter=adapters[chance.randrange(len(adapters))],
            n=3 if i % 5 == 0 else 1,
        )
        for i in range(NUM_REQUESTS)
    ]


def run(core, messages, aborted, chance):
    """Run requests one by one, abort some at random moments; return the outputs by request."""
    outputs, pending = {message.request_id: [] for message in messages}, list(messages)
    for _ in range(3000):
        if pending and chance.random() < 0.4:
            core.handle("gw", pending.pop(0))
        for _, message in core.step():
            for output in message.outputs:
                outputs[output.request_id].append(output)
        core.scheduler.check_integrity()
        running = [r for r in aborted if outputs[r] and not outputs[r][-1].is_last]
        core.scheduler.abort([r for r in running if chance.random() < 0.2])
        if not pending and not core.scheduler.has_work:
            return outputs
    raise AssertionError("a request never ended")


RUNNERS = runners.RUNNERS | {
    "cpu, drafts": {"has_drafts": True},
    "device, drafts": {
        "make_backend": partial(fake_backend, max_num_drafts=16),
        "has_drafts": True,
    },
    "cpu, draft model": {"has_draft_model": True},
    "C": {"make_kernels": kernels_of("native"), "has_drafts": True},
    "C, two ranks": {"make_kernels": kernels_of("native"), "num_ranks": 2, "has_drafts": True},
}
WAYS = {0: "recompute", 40: "swap"}
"""How preempted requests come back, by the number of swap slots."""
COMPUTED_AGAIN = ("cpu", "cpu, late")
"""Runners on which requests of the first family are computed again as well. Which way a request
comes back is the scheduler's choice; runners see only copies.
"""
SHORT = {
    "llama": tuple(RUNNERS.keys() - {"cpu, drafts"}),
    "mistral": ("device", "two ranks", "C"),  # blocks behind a window are given back
    "qwen3_moe": ("C", "device", "two devices"),
    "mixtral": (),  # runners see no more of it than of qwen3_moe
}
"""Runners of each family that do not wait for `make soak`; "C" of the other families, which differ
from these in a layer's formulas only. Tests of decoders on CPUs, devices and ranks compare all;
tests of ends compare all kernels, and "C" has drafts, too.
"""
ALONE = ("olmo2",)
"""Families that ranks cannot share."""


def cases():
    """Parameters (family, runner, slots) of every case, ordered by family."""
    for family, runner, slots in product(FAMILIES, RUNNERS, WAYS):
        if family in ALONE and "num_ranks" in RUNNERS[runner]:
            continue
        is_short = runner in SHORT.get(family, ("C",))
        is_short &= slots > 0 or (family == "llama" and runner in COMPUTED_AGAIN)
        marks = () if is_short else pytest.mark.soak
        name = f"{family}-{runner}, {WAYS[slots]}"
        yield pytest.param(family, RUNNERS[runner], slots, id=name, marks=marks)


class World:
    """A model, its adapters, requests for them, and the expected tokens of each request.

    aborted: ids of the requests that may be aborted.   quantized: a kind of tests.quantized_models.
    """

    def __init__(self, folder, options, quantized=None):
        self.model_dir = twin = save_model(folder / "model", **options)
        if quantized is not None:
            self.model_dir, twin = save_quantized(twin, folder, quantized)
        dirs = [
            save_adapter(twin, folder / "a1", seed=1, r=4, lora_alpha=16),
            save_adapter(twin, folder / "a2", seed=2, r=16, use_rslora=True),
            save_adapter(twin, folder / "a3", seed=3, alora_invocation_tokens=INVOCATION),
        ]
        self.objects: dict[str, bytes] = {}
        refs = [add_adapter(self.objects, self.model_dir, d, folder) for d in dirs]
        self.messages = make_requests(random.Random(5), [None, *refs])
        self.aborted = {message.request_id for message in self.messages[3::6]}
        models = [merged_model(twin, d) for d in (None, *dirs)]
        oracles = dict(zip((None, *refs), models, strict=True))
        self.expected = {
            message.request_id: greedy(
                oracles[message.adapter], list(message.prompt_token_ids), NUM_TOKENS
            )
            for message in self.messages
        }
        repeating = [tokens for tokens in self.expected.values() if len(set(tokens)) < 4]
        assert len(repeating) < len(self.messages) / 4, "such a model shows nothing"


@pytest.fixture(scope="module")
def world_of(tmp_path_factory):
    """A function that makes one world for each family; its expected tokens are slow to compute."""
    return cache(lambda family: World(tmp_path_factory.mktemp("oracle"), FAMILIES[family]))


@pytest.mark.parametrize(("family", "runner", "num_swap_slots"), cases())
def test_each_gets_its_own_tokens_whatever_happens_on_the_way(
    family, tmp_path, num_swap_slots, runner, world_of
):
    check(world_of(family), tmp_path, num_swap_slots, runner)


@pytest.mark.parametrize(
    ("kind", "runner"),
    [("gptq zeros", "two ranks"), ("fp8 block", "cpu")],
)
def test_so_it_is_on_quantised_weights_next_to_their_numbers_in_float32(kind, runner, tmp_path):
    world = World(tmp_path, {"intermediate_size": 192}, quantized=kind)
    check(world, tmp_path, num_swap_slots=40, runner=RUNNERS[runner])


def check(world, folder, num_swap_slots, runner):
    """Run a world's requests, and compare every answer with the expected one."""
    runner = dict(runner)
    has_drafts = runner.pop("has_drafts", False)
    drafter = ReplayDrafter(world.expected, lambda r: r.request_id) if has_drafts else None
    if has_draft_model := runner.pop("has_draft_model", False):
        runner["draft_model_dir"] = world.model_dir  # right for the base model, not for adapters
    core = build_core(
        world.model_dir, folder / "engine", world.objects,
        num_slabs=26, budget=24, num_swap_slots=num_swap_slots, drafter=drafter, **runner,
    )  # fmt: skip
    outputs = run(core, world.messages, world.aborted, random.Random(6))

    for message in world.messages:
        expected = world.expected[message.request_id]
        for index in range(message.sampling_params.n):
            answer = [o for o in outputs[message.request_id] if o.index == index]
            tokens = tokens_of(answer)
            was_aborted = answer[-1].finish_reason == "abort"
            assert was_aborted <= (message.request_id in world.aborted)
            assert tokens == (expected[: len(tokens)] if was_aborted else expected)
    stats = core.take_stats()
    if has_drafts or has_draft_model:
        assert 0 < stats.drafts.accepted_tokens < stats.drafts.drafted_tokens
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.adapter_evictions + stats.prefix_evictions > 0
    assert bool(stats.swapped) == bool(num_swap_slots)
    assert any(o[-1].finish_reason == "abort" for o in outputs.values())
