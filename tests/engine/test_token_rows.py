"""Trained rows of the embedding and the head are served as PEFT computes them."""

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.real_core import add_adapter, build_core, prove
from tests.oracle import greedy
from tests.tiny_models import save_model

IDS = [5, 9, 100, 31]
PROMPTS = [[5, 7, 9, 200, 1], [30, 31, 5, 100, 7]]
TOKENS = {"embed_tokens": [5, 7, 200], "lm_head": [5, 7, 200]}
ENDS = ["embed_tokens", "lm_head"]
CASES = {
    "tokens": {"trainable_token_indices": [5, 7, 200]},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [5, 100]}},
    "the same tokens of both": {"trainable_token_indices": TOKENS},
    "other tokens of both": {"trainable_token_indices": TOKENS | {"lm_head": [100, 5]}},
    "tokens beside LoRA of the head": {
        "trainable_token_indices": [5, 7], "target_modules": ["q_proj", "lm_head"],
    },
    "a saved embedding": {"modules_to_save": ["embed_tokens"]},
    "a saved head": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "embed_tokens"]},
    "both saved": {"modules_to_save": ENDS},
    "both saved as one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "both changed in place": {},
    "both changed in place below LoRA": {"target_modules": ["q_proj", *ENDS]},
}  # fmt: skip


class World:
    """A model, and an engine that serves it."""

    def __init__(self, folder, tied):
        torch.set_num_threads(1)
        self.folder, self.objects = folder, {}
        self.model_dir = save_model(folder / "model", tied=tied)
        self.core = build_core(self.model_dir, folder / "engine", self.objects)

    def fresh_model(self):
        return AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)

    def write(self, folder, changes):
        """Save an adapter with PEFT, of which LoRA and some rows of the ends were trained."""
        options = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
        model = peft.get_peft_model(self.fresh_model(), LoraConfig(**options | changes))
        torch.manual_seed(2)
        is_in_place = not {"modules_to_save", "trainable_token_indices"} & changes.keys()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5)
            elif "trainable_tokens" in name:
                parameter.data += torch.randn_like(parameter)
            elif "modules_to_save" in name or (is_in_place and any(end in name for end in ENDS)):
                parameter.data[IDS] += torch.randn(len(IDS), parameter.shape[1])
        model.save_pretrained(folder, save_embedding_layers=is_in_place)
        return folder

    def tokens(self, adapter):
        for number, prompt in enumerate(PROMPTS):
            self.core.handle(
                "gw", make_message(f"r{number}", prompt=prompt, max_tokens=8, adapter=adapter)
            )
        outputs = run_until_idle(self.core)
        return [tokens_of(outputs[f"r{number}"]) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("rows"), tied=request.param)


@pytest.mark.parametrize("case", CASES)
def test_trained_rows_give_the_tokens_of_peft(world, tmp_path, case):
    folder = world.write(tmp_path / "adapter", CASES[case])
    model = PeftModel.from_pretrained(world.fresh_model(), folder).eval()
    answers = world.tokens(add_adapter(world.objects, world.model_dir, folder, world.folder))
    assert answers == [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert answers != world.tokens(None)


def test_a_proof_covers_trained_rows(world, tmp_path):
    folder = world.write(tmp_path / "adapter", CASES["both changed in place below LoRA"])
    ref = add_adapter(world.objects, world.model_dir, folder, world.folder)
    path = tmp_path / "object"
    path.write_bytes(world.objects[ref.digest])
    proof = prove(world.core, ref, path)
    assert (proof.verdict, proof.message) == ("passed", "")
