"""The first token of transformers + PEFT for each request alone, a reference for other systems.

It shows when a system drops or swaps adapters. Only the first token is compared: with random
weights the answers of two correct systems differ from the first near tie on. Such weights amplify
small errors, too: 31 of 32 of OpenVINO's first tokens equal the reference's in float32, and 7 of 32
with int8 weights. So there are two figures: the share of first tokens that are equal, and the share
that is within the likeliest 1 % of the vocabulary, which is all of them in float32 and 28 of 32
with int8. The base model's first tokens are within that 1 % for 0 of 32 requests on an adapter.
"""

from collections.abc import Sequence

import torch

from bench.checkpoint import THREADS, Checkpoint
from bench.peft_generate import BASE, load_model
from bench.workload import BenchRequest

_NEAR = 0.01  # share of the vocabulary


class FirstTokens:
    """The reference model with all adapters loaded; the same request is computed only once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        torch.set_num_threads(THREADS)
        self._base_model = checkpoint.base_model
        self._model = load_model(checkpoint)
        self._num_near = max(1, int(_NEAR * checkpoint.vocab_size))
        self._known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def likely(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        """Return the likeliest 1 % of all tokens for each request, the likeliest first."""
        return [self._likely(request.model, request.prompt_token_ids) for request in requests]

    def adapters_matter(self, requests: Sequence[BenchRequest]) -> float:
        """Return the share of requests for which the base model's first token is another."""
        base = [self._likely(self._base_model, request.prompt_token_ids) for request in requests]
        differ = [a[0] != b[0] for a, b in zip(self.likely(requests), base, strict=True)]
        return sum(differ) / len(differ)

    @torch.inference_mode()
    def _likely(self, model: str, prompt: tuple[int, ...]) -> list[int]:
        if (model, prompt) not in self._known:
            name = BASE if model == self._base_model else model
            output = self._model(
                input_ids=torch.tensor([prompt]), adapter_names=[name], logits_to_keep=1
            )
            top = output.logits[0, -1].topk(self._num_near)
            self._known[model, prompt] = top.indices.tolist()
        return self._known[model, prompt]
