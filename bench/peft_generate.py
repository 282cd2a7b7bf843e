"""The peer: transformers' `generate` with PEFT's mixed `adapter_names`, in this process.

The peer serves as well as static batches can: whenever it is idle it takes all requests that have
arrived, as one batch, padded on the left; an answer counts as complete at its own last token, not
at its batch's.
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM, StoppingCriteria

from bench.checkpoint import THREADS, Checkpoint
from bench.outcome import Outcome
from bench.workload import BenchRequest, warm_up_requests

BASE = "__base__"  # PEFT's word for no adapter


class PeftPeer:
    """The base model in float32 with all adapters loaded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        torch.set_num_threads(THREADS)
        self.base_model = checkpoint.base_model
        self._model = load_model(checkpoint)

    def warm_up(self, models: Sequence[str]) -> None:
        """Generate a few tokens with every model, as the server's warm-up does."""
        self._generate(warm_up_requests(models), time.perf_counter())

    def run(self, requests: Sequence[BenchRequest]) -> list[Outcome]:
        """Serve requests as they arrive; return outcomes in the order of the requests."""
        waiting = sorted(requests, key=lambda request: request.due_s)
        outcomes: list[Outcome] = []
        start = time.perf_counter()
        while waiting:
            time.sleep(max(0.0, start + waiting[0].due_s - time.perf_counter()))
            now_s = time.perf_counter() - start
            batch = [request for request in waiting if request.due_s <= now_s]
            waiting = waiting[len(batch) :]
            outcomes += self._generate(batch, start)
        return sorted(outcomes, key=lambda outcome: outcome.index)

    @torch.inference_mode()
    def _generate(self, batch: Sequence[BenchRequest], start: float) -> list[Outcome]:
        clock = _TokenClock(start)
        input_ids, attention_mask = _pad_left([request.prompt_token_ids for request in batch])
        names = [BASE if r.model == self.base_model else r.model for r in batch]
        options: dict[str, Any] = {"adapter_names": names} if set(names) != {BASE} else {}
        with nullcontext() if options else self._without_adapters():
            output = self._model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                max_new_tokens=max(request.max_tokens for request in batch),
                do_sample=False,
                stopping_criteria=[clock],
                **options,
            )
        answers = output[:, input_ids.shape[1] :].tolist()
        return [
            request.outcome(answer[: request.max_tokens], clock.token_s[: request.max_tokens])
            for request, answer in zip(batch, answers, strict=True)
        ]

    def _without_adapters(self) -> AbstractContextManager[None]:
        return (
            self._model.disable_adapter() if isinstance(self._model, PeftModel) else nullcontext()
        )


class _TokenClock(StoppingCriteria):
    """Notes when each token of the batch was generated; it stops no answer."""

    def __init__(self, start: float) -> None:
        self.token_s: list[float] = []
        self._start = start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.token_s.append(time.perf_counter() - self._start)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load_model(checkpoint: Checkpoint) -> PeftModel | LlamaForCausalLM:
    """Load the model with all its adapters by PEFT; if there are none, by transformers alone."""
    base = LlamaForCausalLM.from_pretrained(checkpoint.model_dir, dtype=torch.float32)
    base.generation_config.eos_token_id = None  # answers end only by their length
    base.generation_config.pad_token_id = 0
    if not checkpoint.adapters:
        return base.eval()
    (first, folder), *others = checkpoint.adapters.items()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base, str(folder), adapter_name=first)
        for name, folder in others:
            model.load_adapter(str(folder), adapter_name=name)
    model.eval()
    return model


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input_ids, attention_mask), both [batch, longest]."""
    longest = max(len(prompt) for prompt in prompts)
    input_ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(input_ids), torch.tensor(mask)
