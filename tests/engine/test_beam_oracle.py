"""Beam search on real models gives the answers of transformers, and of vLLM where answers end."""

import random
from functools import cache

import pytest
import torch

from tests.engine.beams import vllm_beams
from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.real_core import add_adapter, build_core
from tests.engine.runners import RUNNERS
from tests.oracle import merged_model
from tests.tiny_models import save_adapter, save_model

WIDTH, NUM_TOKENS = 4, 20


class World:
    """Searches for the base model and an adapter, some of which end early, and what they find.

    expected: by request, tokens, sum of logprobs and finish reason of each answer.
    """

    def __init__(self, folder):
        self.model_dir = save_model(folder / "model")
        adapter_dir = save_adapter(self.model_dir, folder / "a1", seed=1, r=4, lora_alpha=16)
        self.objects = {}
        ref = add_adapter(self.objects, self.model_dir, adapter_dir, folder)
        models = {None: merged_model(self.model_dir, None), ref: merged_model(*self._dirs(folder))}
        chance = random.Random(3)
        stem = [chance.randrange(1, 250) for _ in range(35)]
        self.messages, self.expected = [], {}
        for number, adapter in enumerate((None, ref, ref, None)):
            prompt = stem + [chance.randrange(1, 250) for _ in range(3 + 7 * number)]
            found = transformers_beams(models[adapter], prompt)
            ends = ()
            if number % 2:  # the answers without ends have these, early and late
                ends = (found[0][0][2], found[1][0][-4])
                found = vllm_beams(
                    proposals(models[adapter], prompt), len(prompt), WIDTH, NUM_TOKENS, ends
                )
                assert {reason for *_, reason in found} & {"stop"}
            message = make_message(
                f"r{number}", prompt=prompt, max_tokens=NUM_TOKENS, adapter=adapter, n=WIDTH,
                logprobs=0, beam_search=True, ignore_eos=True, stop_token_ids=ends,
            )  # fmt: skip
            self.messages.append(message)
            self.expected[message.request_id] = found

    @staticmethod
    def _dirs(folder):
        return folder / "model", folder / "a1"


@torch.inference_mode()
def transformers_beams(model, prompt):
    """The answers of `generate` when nothing ends one: tokens, sum of logprobs, finish reason."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
        num_beams=WIDTH, num_return_sequences=WIDTH, length_penalty=1.0, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    totals = (out.sequences_scores * NUM_TOKENS).tolist()
    tokens = out.sequences[:, len(prompt) :].tolist()
    return [(ids, total, "length") for ids, total in zip(tokens, totals, strict=True)]


def proposals(model, prompt):
    """A function that gives the likeliest tokens by the model's own logits."""

    @torch.inference_mode()
    def propose(tokens):
        logprobs = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1)
        top = logprobs.topk(2 * WIDTH)
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    return propose


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return cache(lambda: World(tmp_path_factory.mktemp("beams")))


@pytest.mark.parametrize("num_swap_slots", [0, 40])
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_answers_are_those_of_transformers_and_vllm(runner, num_swap_slots, world, tmp_path):
    """The beams fit neither the arena nor the seats together, and there are copies and swaps."""
    known = world()
    core = build_core(
        known.model_dir, tmp_path / "engine", known.objects, num_slabs=18, num_seqs=6, budget=24,
        num_swap_slots=num_swap_slots, **RUNNERS[runner],
    )  # fmt: skip
    for message in known.messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    for message in known.messages:
        for index, (tokens, total, reason) in enumerate(known.expected[message.request_id]):
            answer = [o for o in outputs[message.request_id] if o.index == index]
            assert (tokens_of(answer), answer[-1].finish_reason) == (tokens, reason)
            told = [each.logprob for o in answer for each in o.logprobs or ()]
            assert sum(told) == pytest.approx(total, abs=1e-4)
    stats = core.take_stats()
    assert stats.preemptions > 0
    assert bool(stats.swapped) == bool(num_swap_slots)
