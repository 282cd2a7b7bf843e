"""Trained rows of the embedding and the head are served as PEFT computes them."""

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from lora.errors import AdapterError
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message, prompt_logprobs_of, run_until_idle, tokens_of
from tests.engine.gpu.backends import fake_backend
from tests.engine.real_core import add_adapter, build_core, prove
from tests.oracle import greedy
from tests.tiny_models import save_model

IDS = [5, 9, 100, 31]
VOCAB = 292
NEW = [VOCAB, VOCAB + 1, VOCAB + 2]
PROMPTS = [[5, 7, 9, 200, 1], [30, 31, 5, 100, 7]]
ENDS = ["embed_tokens", "lm_head"]
RESIZED = {
    "in place": {},
    "below LoRA of both": {"target_modules": ["q_proj", *ENDS]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [5, *NEW], "lm_head": [5, *NEW]}},
    "both saved": {"modules_to_save": ENDS},
}


class World:
    """A model, and an engine that serves it."""

    def __init__(self, folder, tied, **options):
        self.folder, self.objects = folder, {}
        self.model_dir = save_model(folder / "model", tied=tied)
        self.core = build_core(self.model_dir, folder / "engine", self.objects, **options)

    def fresh_model(self, num_added=0):
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        if num_added:
            model.resize_token_embeddings(VOCAB + num_added, mean_resizing=False)
        return model

    def write(self, folder, changes, num_added=0):
        """Save an adapter with PEFT, of which LoRA and some rows of the ends were trained, and load
        it with PEFT.
        """
        options = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
        model = peft.get_peft_model(self.fresh_model(num_added), LoraConfig(**options | changes))
        torch.manual_seed(2)
        is_in_place = not {"modules_to_save", "trainable_token_indices"} & changes.keys()
        size = 2.5 if num_added else 1.0  # so that new tokens are said
        rows = [*IDS, *range(VOCAB, VOCAB + num_added)]
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5)
            elif "trainable_tokens" in name:
                parameter.data += size * torch.randn_like(parameter)
            elif "modules_to_save" in name or (is_in_place and any(end in name for end in ENDS)):
                parameter.data[rows] += size * torch.randn(len(rows), parameter.shape[1])
        model.save_pretrained(folder, save_embedding_layers=is_in_place or num_added > 0)
        return PeftModel.from_pretrained(self.fresh_model(num_added), folder).eval()

    def add(self, folder):
        return add_adapter(self.objects, self.model_dir, folder, self.folder)

    def run(self, prompts, adapters, max_tokens=8, **sampling):
        """Outputs of each prompt with its adapter, all in one batch."""
        for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            message = make_message(
                f"r{number}", prompt=prompt, max_tokens=max_tokens, adapter=adapter, **sampling
            )
            self.core.handle("gw", message)
        outputs = run_until_idle(self.core)
        return [outputs[f"r{number}"] for number in range(len(prompts))]

    def tokens(self, adapter, prompts=PROMPTS):
        return [tokens_of(each) for each in self.run(prompts, [adapter] * len(prompts))]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("rows"), tied=request.param)


@pytest.mark.parametrize("case", RESIZED)
def test_added_tokens_are_read_and_said_as_by_peft(world, tmp_path, case):
    model = world.write(tmp_path / "adapter", RESIZED[case], num_added=3)
    prompts = [[5, NEW[0], 9, NEW[1], 1], [NEW[2], 31, 5], *([i, i + 7, 3] for i in range(20))]
    answers = world.tokens(world.add(tmp_path / "adapter"), prompts)
    assert answers == [greedy(model, prompt, 8) for prompt in prompts]
    assert {token for answer in answers for token in answer} & {*NEW}, "none is said"


def test_a_proof_covers_trained_rows(world, tmp_path):
    world.write(tmp_path / "adapter", RESIZED["below LoRA of both"], num_added=2)
    ref = world.add(tmp_path / "adapter")
    path = tmp_path / "object"
    path.write_bytes(world.objects[ref.digest])
    proof = prove(world.core, ref, path)
    assert (proof.verdict, proof.message) == ("passed", "")
    assert proof.max_difference < proof.tolerance < proof.max_effect


def test_rows_keep_their_bits_beside_adapters_that_add_tokens(tmp_path):
    kernels = kernels_of("native")
    world = World(tmp_path, tied=False, make_kernels=kernels)
    world.write(tmp_path / "two", RESIZED["in place"], num_added=2)
    world.write(tmp_path / "one", RESIZED["below LoRA of both"], num_added=1)
    world.write(tmp_path / "none", RESIZED["in place"])
    two, one, none = (world.add(tmp_path / name) for name in ("two", "one", "none"))
    asked = {"logprobs": 5, "prompt_logprobs": 3}
    together = world.run([PROMPTS[0]] * 5, [None, two, none, one, two], **asked)
    for outputs, adapter in zip(together, [None, two, none, one, two], strict=True):
        (alone,) = world.run(PROMPTS[:1], [adapter], **asked)
        assert prompt_logprobs_of(outputs) == prompt_logprobs_of(alone)
        assert [o.logprobs for o in outputs] == [o.logprobs for o in alone]


def test_what_a_request_asks_of_added_tokens_holds_for_its_adapter_alone(world, tmp_path):
    world.write(tmp_path / "adapter", RESIZED["in place"], num_added=3)
    ref = world.add(tmp_path / "adapter")

    def first(adapter, **sampling):
        (outputs,) = world.run([[8, 7, 30]], [adapter], max_tokens=2, **sampling)
        return tokens_of(outputs)

    wanted, told = NEW[2], {"logit_bias": ((NEW[2], 100.0),)}
    assert first(ref, **told) == [wanted, wanted]
    assert first(None, **told) == first(None)
    banned = tuple((token, -100.0) for token in NEW)
    assert not {*first(ref, logit_bias=banned)} & {*NEW}
    assert first(ref, allowed_token_ids=(NEW[1],)) == [NEW[1]] * 2
    assert first(ref, stop_token_ids=(wanted,), **told) == [wanted]
    said, behind = first(ref, frequency_penalty=300.0, **told)
    assert (said, behind == wanted) == (wanted, False)
    (grammar,) = world.run([[8, 7, 30]], [ref], max_tokens=2, grammar="any", **told)
    assert not {*tokens_of(grammar)} & {*NEW}, "a grammar knows the base model's tokens alone"


def test_a_token_that_an_adapter_does_not_add_reads_as_zeros(world, tmp_path):
    world.write(tmp_path / "adapter", RESIZED["in place"])
    world.write(tmp_path / "one", RESIZED["in place"], num_added=1)
    adapters = [None, *(world.add(tmp_path / name) for name in ("adapter", "one"))]
    first, other = (world.run([[5, token, 9]] * 3, adapters) for token in NEW[1:])
    assert list(map(tokens_of, first)) == list(map(tokens_of, other))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_added_tokens_on_other_kernels_and_on_ranks(tmp_path, num_ranks):
    kernels = kernels_of("native")
    world = World(tmp_path, tied=True, num_ranks=num_ranks, make_kernels=kernels)
    model = world.write(tmp_path / "adapter", RESIZED["below LoRA of both"], num_added=3)
    prompts = [[5, NEW[0], 9, NEW[1], 1], [NEW[2], 31, 5]]
    answers = world.tokens(world.add(tmp_path / "adapter"), prompts)
    assert answers == [greedy(model, prompt, 8) for prompt in prompts]


def test_drafts_of_added_tokens_change_no_answer(tmp_path):
    draft_model_dir = save_model(tmp_path / "draft", num_hidden_layers=1, seed=5)
    world = World(tmp_path, tied=True, draft_model_dir=draft_model_dir)
    model = world.write(tmp_path / "adapter", RESIZED["in place"], num_added=3)
    prompts = [[5, NEW[0], 9, NEW[1], 1], [NEW[2], 31, 5]]
    answers = world.tokens(world.add(tmp_path / "adapter"), prompts)
    assert answers == [greedy(model, prompt, 8) for prompt in prompts]


def test_on_a_device_added_tokens_are_refused_in_one_sentence(world, tmp_path):
    world.write(tmp_path / "adapter", RESIZED["in place"], num_added=1)
    objects = {}
    ref = add_adapter(objects, world.model_dir, tmp_path / "adapter", world.folder)
    core = build_core(world.model_dir, tmp_path / "engine", objects, make_backend=fake_backend)
    core.handle("gw", make_message("r", prompt=PROMPTS[0], adapter=ref))
    with pytest.raises(AdapterError, match="added to the vocabulary are served on CPUs only"):
        run_until_idle(core)
