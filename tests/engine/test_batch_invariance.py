"""A request that is repeated dozens of times (in `make soak` 200 times) gets the same tokens and
logprobs, its prompt's included, to the last bit.

The runs differ in the other requests, their adapters and grammars, the cuts of chunks, drafts, hits
in the prefix cache, preemption by swap or recomputation, a step in flight, the number of answers,
and aborts.
Without the setting the bits do differ, which shows that the test can fail.
"""

import random
import struct
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from engine.wire.messages import SamplingParams
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message, prompt_logprobs_of
from tests.engine.real_core import add_adapter, build_core
from tests.engine.replay_drafter import ReplayDrafter
from tests.soak import soak
from tests.tiny_models import ALL_TARGETS, QWEN3_MOE, save_adapter, save_model

NUM_TIMES = 8
"""How often each run makes the request, half of the times greedy, half sampled."""
MANY, FEW, SHARED = 25, 6, 14
"""Numbers of runs: for 200 requests in `make soak`, for 48, and for ranks, which preempt less."""
PROMPT = [(7 * i * i + 3) % 250 + 1 for i in range(61)]
LOGPROBS = {"logprobs": 4, "max_tokens": 11, "ignore_eos": True}
GREEDY = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, logit_bias=((17, 2.0), (40, -3.0)), **LOGPROBS
)
DRAWN = SamplingParams(
    temperature=1.4, top_p=0.97, top_k=90, seed=11, frequency_penalty=0.3, presence_penalty=0.2,
    prompt_logprobs=2, **LOGPROBS,
)  # fmt: skip


class World:
    """A model, its adapters, and the settings of a run.

    linear: modules of layers that adapters change.   num_slabs: what arenas may have.
    options: of the model.
    """

    def __init__(self, folder, linear=ALL_TARGETS, num_slabs=(18, 20, 22, 42), **options):
        self.folder = folder
        self.num_slabs = num_slabs
        self.model_dir = save_model(folder / "model", intermediate_size=224, **options)
        targets = {4: ["lm_head"], 16: [*linear, "embed_tokens", "lm_head"], 24: linear}
        dirs = [
            save_adapter(
                self.model_dir, folder / f"a{rank}", seed=rank, r=rank, target_modules=modules
            )
            for rank, modules in targets.items()
        ]
        self.objects = {}
        refs = [add_adapter(self.objects, self.model_dir, d, folder) for d in dirs]
        self.adapter = refs[1]
        self.adapters = [None, *refs]

    def core(self, chance, number, make_kernels, num_ranks, quantization, drafter):
        return build_core(
            self.model_dir,
            self.folder / f"engine{number}-{chance.getrandbits(32)}",
            self.objects,
            # With several ranks an adapter has more slabs, since half of each tile is not cut, and
            # tiles of the embedding and the head are whole.
            num_slabs=chance.choice(self.num_slabs if num_ranks == 1 else (33, 34, 35, 54)),
            budget=chance.choice((13, 24, 64, 200)),
            num_seqs=chance.choice((4, 12)),
            num_swap_slots=40 * (number % 2),
            lag=number % 3 == 0,
            make_kernels=make_kernels,
            num_ranks=num_ranks,
            quantization=quantization,
            drafter=drafter,
        )

    def requests(self, chance):
        """The repeated request and other requests, shuffled."""
        ours = [self._ours(chance, time) for time in range(NUM_TIMES)]
        others = [self._other(chance, i) for i in range(chance.choice((2, 10)))]
        messages = [*ours, *others]
        chance.shuffle(messages)
        return messages

    def _ours(self, chance, time):
        params = replace((GREEDY, DRAWN)[time % 2], n=chance.choice((1, 1, 1, 3)))
        # A request with a salt of its own finds nothing in the cache.
        salt = chance.choice(("", f"{time}"))
        message = make_message(
            f"ours{time}", prompt=PROMPT, adapter=self.adapter, cache_salt=salt, n=params.n
        )
        return replace(message, sampling_params=params, token_lease=100)

    def _other(self, chance, number):
        length = chance.randrange(1, 80)
        return make_message(
            f"other{number}",
            tenant_id=f"t{chance.randrange(3)}",
            prompt=[chance.randrange(1, 250) for _ in range(length)],
            adapter=chance.choice(self.adapters),
            max_tokens=chance.randrange(1, 25),
            n=chance.choice((1, 2)),
            logprobs=chance.choice((None, 2)),
            grammar=("", "quick")[number % 2],
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("invariance"))


@pytest.fixture(scope="module")
def world_of_experts(tmp_path_factory):
    options = {**QWEN3_MOE, "moe_intermediate_size": 64, "num_experts": 4}
    folder = tmp_path_factory.mktemp("invariance")
    # Slabs are smaller than those of a dense model, whose largest tiles are of the MLP.
    return World(folder, ALL_TARGETS[:4], (28, 30, 32, 70), family="qwen3_moe", **options)


def run(core, messages, chance):
    """Send requests at random moments and abort others than the repeated one at random.

    Returns outputs by (request id, answer), and the repeated requests that were preempted, by what
    became of their KV.
    """
    outputs, pending = defaultdict(list), list(messages)
    preempted = {"swapped": set(), "to be computed again": set()}
    for _ in range(5000):
        if pending and chance.random() < 0.5:
            core.handle("gw", pending.pop())
        for _, message in core.step():
            for output in message.outputs:
                outputs[output.request_id, output.index].append(output)
        if chance.random() < 0.05:
            core.scheduler.abort([f"other{chance.randrange(10)}"])
        for request in core.scheduler.queues.waiting:
            if request.request_id.startswith("ours") and request.output_token_ids:
                fate = "swapped" if request.swapped else "to be computed again"
                preempted[fate].add((request.request_id, request.index))
        if not pending and not core.scheduler.has_work:
            return outputs, preempted
    raise AssertionError("a request never ended")


def pattern(outputs):
    """An answer's tokens, the tokens that have logprobs, and the bits of these logprobs."""
    tokens = tuple(token for output in outputs for token in output.new_token_ids)
    told = [told for output in outputs for told in output.logprobs or ()]
    assert len(told) == len(tokens) == LOGPROBS["max_tokens"]
    told += prompt_logprobs_of(outputs)
    numbers = [number for t in told for number in (t.logprob, *(value for _, value in t.top))]
    named = tuple(token for t in told for token, _ in t.top)
    return tokens, named, struct.pack(f"{len(numbers)}f", *numbers)


def way_of(request_id):
    return ("greedy", "drawn")[int(request_id[4:]) % 2]


def answer_of(request):
    """The key of a repeated answer, which is drafted from an earlier run; None for others."""
    if not request.request_id.startswith("ours"):
        return None
    return way_of(request.request_id), request.index


def find_patterns(world, make_kernels, num_runs, num_ranks=1, quantization=None):
    """({(greedy or drawn, answer): {pattern: times}}, {event: times}) over all runs."""
    patterns, happened = defaultdict(Counter), Counter()
    kernels, made, said = [], [], {}

    def make_once(shape):
        if len(kernels) < num_ranks:
            kernels.append(make_kernels(shape))
        made.append(kernels[len(made) % num_ranks])  # each rank has its own kernels
        return made[-1]

    for number in range(num_runs):
        chance = random.Random(number)
        drafter = ReplayDrafter(said, answer_of, number)
        core = world.core(chance, number, make_once, num_ranks, quantization, drafter)
        outputs, preempted = run(core, world.requests(chance), chance)
        for (request_id, index), answer in outputs.items():
            happened["cancelled"] += answer[-1].finish_reason == "abort"
            if request_id.startswith("ours"):
                way = way_of(request_id)
                patterns[way, index][pattern(answer)] += 1
                said[way, index] = [t for output in answer for t in output.new_token_ids]
                happened["found in the cache"] += answer[-1].num_cached_tokens > 0
                happened["not found"] += answer[-1].num_cached_tokens == 0
        happened.update({fate: len(requests) for fate, requests in preempted.items()})
        drafts = core.take_stats().drafts
        happened["draft accepted"] += drafts.accepted_tokens
        happened["draft rejected"] += drafts.drafted_tokens - drafts.accepted_tokens
    return patterns, happened


@pytest.mark.parametrize(
    ("quantization", "num_runs"),
    [(None, FEW), *soak((None, MANY), ("int8", MANY), ("int4", MANY))],
)
def test_a_request_has_one_bit_pattern_whatever_happens_around_it(world, quantization, num_runs):
    make_kernels = kernels_of("native")
    patterns, happened = find_patterns(world, make_kernels, num_runs, quantization=quantization)
    assert_one_each(patterns, happened, num_runs)


def assert_one_each(patterns, happened, num_runs):
    """Assert that each way has one pattern and all events happened. See find_patterns."""
    assert {key: len(found) for key, found in patterns.items()} == dict.fromkeys(patterns, 1)
    assert sum(patterns["greedy", 0].values()) == num_runs * NUM_TIMES / 2
    assert sum(patterns["drawn", 0].values()) == num_runs * NUM_TIMES / 2
    assert len(patterns) == 6
    assert len({next(iter(found)) for found in patterns.values()}) >= 4
    assert len(happened) == 7
    assert min(happened.values()) >= 1, happened


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_any_number_of_threads_has_the_same_bits(world, quantization):
    patterns = defaultdict(Counter)
    for threads in (2, 3, 1):  # other tests have one
        torch.set_num_threads(threads)
        make_kernels = kernels_of("native", threads)
        found, _ = find_patterns(world, make_kernels, 1, quantization=quantization)
        for key, times in found.items():
            patterns[key] += times
    assert {key: len(found) for key, found in patterns.items()} == dict.fromkeys(patterns, 1)
    assert sum(patterns["greedy", 0].values()) == 3 * NUM_TIMES / 2


def test_so_it_has_where_ranks_share_the_model(world):
    kernels = kernels_of("native")
    assert_one_each(*find_patterns(world, kernels, SHARED, num_ranks=2), SHARED)


@pytest.mark.parametrize("quantization", ["int4", *soak(None, "int8")])
def test_so_it_has_in_a_mixture_of_experts(world_of_experts, quantization):
    make_kernels = kernels_of("native")
    found = find_patterns(world_of_experts, make_kernels, FEW, quantization=quantization)
    assert_one_each(*found, FEW)


def test_without_the_setting_its_bits_depend_on_others(world):
    patterns, _ = find_patterns(world, kernels_of("torch"), 2)
    assert all(len(patterns[way, 0]) > 1 for way in ("greedy", "drawn"))
