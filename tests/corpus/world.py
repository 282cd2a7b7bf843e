"""A tiny model, an engine that serves it with any adapter, and what PEFT says for comparison."""

import itertools
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from registry.base.base_model import BaseModel
from registry.checks.passport import Passport
from registry.checks.validate import AdapterLimits
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE
from tests.engine.fakes import make_message, tokens_of
from tests.engine.real_core import add_adapter, build_core
from tests.registry.factories import validate_adapter
from tests.tiny_models import ALL_TARGETS, save_model

NUM_TOKENS = 8
INVOCATION = [17, 18, 19]
PROMPTS = [[5, *INVOCATION, 7, 9], [*range(30, 60), *INVOCATION, 3], [*INVOCATION, 200, 100, 50]]


class World:
    """A tiny model, and an engine that serves it with any adapter.

    options: of tests.tiny_models.save_model.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.model_dir = save_model(folder / "model", **options)
        self.base = BaseModel.load(self.model_dir, "tiny", folder / "cache")
        self.objects: dict[str, bytes] = {}
        self.core = build_core(self.model_dir, folder / "engine", self.objects)
        self._numbers = itertools.count()
        self.base_says = self.tokens(None, PROMPTS)

    def fresh_model(self, num_added=0):
        """The model for transformers, with random rows for added tokens."""
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        if num_added:
            num_tokens = model.config.vocab_size + num_added
            model.resize_token_embeddings(num_tokens, mean_resizing=False)
        return model

    def adapted(self, options: dict[str, Any], num_added: int = 0) -> Any:
        """PEFT's model with a fresh adapter, always the same one.   options: see make_config."""
        torch.manual_seed(3)
        return get_peft_model(self.fresh_model(num_added), make_config(options))

    def validate(self, folder: Path) -> Passport:
        """Check the adapter in a folder as an upload is checked. Raises InvalidAdapter."""
        config = (folder / CONFIG_FILE).read_bytes()
        return validate_adapter(config, folder / WEIGHTS_FILE, self.base, AdapterLimits())

    def answers(self, adapter_dir: Path) -> list[list[int]]:
        """The engine's answers to PROMPTS with an adapter, which is uploaded."""
        ref = add_adapter(self.objects, self.model_dir, adapter_dir, self.folder)
        return self.tokens(ref, PROMPTS)

    def tokens(self, adapter, prompts):
        """The engine's answer to each prompt; all prompts run in one batch."""
        outputs = {f"r{next(self._numbers)}": [] for _ in prompts}
        for name, prompt in zip(outputs, prompts, strict=True):
            self.core.handle(
                "gw", make_message(name, prompt=prompt, max_tokens=NUM_TOKENS, adapter=adapter)
            )
        for _ in range(200):
            for _, message in self.core.step():
                for output in message.outputs:
                    outputs[output.request_id].append(output)
            if not self.core.scheduler.has_work:
                return [tokens_of(answer) for answer in outputs.values()]
        raise AssertionError("a request never ended")

    @torch.inference_mode()
    def assert_peft_says(
        self, adapter_dir: Path, answers: list[list[int]], num_added: int = 0
    ) -> None:
        """Check that PEFT, with this adapter, has each token of the answers to PROMPTS as its first
        choice.
        """
        model = PeftModel.from_pretrained(self.fresh_model(num_added), adapter_dir).eval()
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            assert answer == logits.argmax(-1).tolist()


def make_config(options: dict[str, Any]) -> LoraConfig:
    """A LoraConfig in which these options are not those of a plain LoRA on all projections."""
    plain = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS}
    return LoraConfig(**plain | options)


def randomize(model: torch.nn.Module) -> None:
    """Give LoRA's weights, and trained tokens, random values that change the model's answers."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.8 / parameter.shape[-1] ** 0.5)
        elif "trainable_tokens" in name:
            parameter.data += torch.randn_like(parameter)
