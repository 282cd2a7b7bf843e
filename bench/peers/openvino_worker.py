"""The other end of `bench.peers.worker`, in an environment with openvino-genai, without our code.

Per-request adapters in one batch are silently wrong (openvino-genai 2026.4.1: `generate` applies
the first request's adapter to all, `add_request` the adapter that was applied last). So a burst is
served in waves, one per adapter with all its requests, and a wave begins with a `generate` of one
token, which applies the adapter. The cost of that token cannot be measured (37.0 tokens per CPU
second against 36.6 with waves of `generate`), and the steps show when each token came.
"""

import json
import os
import sys
import time

import numpy as np
import openvino
import openvino_genai as genai

_KV_PRECISION = {"float32": "f32", "int8": "u8"}
_WARM_UP_PROMPT = range(1, 33)
_WARM_UP_TOKENS = 4


class Pipeline:
    """Continuous batching on the CPU."""

    def __init__(self, job):
        self._adapters = {}
        for name, folder in job["adapters"].items():
            # The factor that PEFT applies, alpha / r, is only in PEFT's config.
            with open(f"{folder}/adapter_config.json") as file:
                config = json.load(file)
            adapter = genai.Adapter(f"{folder}/adapter_model.safetensors")
            self._adapters[name] = (adapter, config["lora_alpha"] / config["r"])
        properties = {
            "INFERENCE_NUM_THREADS": job["threads"],
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": _KV_PRECISION[job["precision"]],
        }
        if self._adapters:
            every = [adapter for adapter, _ in self._adapters.values()]
            properties["adapters"] = genai.AdapterConfig(every)
        self._pipeline = genai.ContinuousBatchingPipeline(
            job["model_dir"], genai.SchedulerConfig(), "CPU", properties
        )
        for model in (job["base_model"], *self._adapters):
            self._wave(model, [(_WARM_UP_PROMPT, _WARM_UP_TOKENS)], time.perf_counter())

    def run(self, requests):
        """Serve a burst; return [{"token_ids", "token_s"}] in the order of the requests."""
        start = time.perf_counter()
        answers = [None] * len(requests)
        for model in dict.fromkeys(request["model"] for request in requests):
            places = [i for i, request in enumerate(requests) if request["model"] == model]
            asks = [(requests[i]["prompt_token_ids"], requests[i]["max_tokens"]) for i in places]
            for place, answer in zip(places, self._wave(model, asks, start), strict=True):
                answers[place] = answer
        return answers

    def _wave(self, model, asks, start):
        """Serve requests of one model. asks: (prompt, max_tokens) of each."""
        if self._adapters:
            self._pipeline.generate([_tensor([1])], [self._config(1, model)])
        handles = [
            self._pipeline.add_request(index, _tensor(prompt), self._config(max_tokens))
            for index, (prompt, max_tokens) in enumerate(asks)
        ]
        answers = [{"token_ids": [], "token_s": []} for _ in asks]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter() - start
            for handle, answer in zip(handles, answers, strict=True):
                _take(handle, answer, now_s)
        return answers

    def _config(self, max_tokens, model=None):
        """Make the configuration of a generation.

        model: the model whose adapter is applied (the base has none); None: leave it applied.
        """
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        if model is not None:
            adapter = self._adapters.get(model)
            config.adapters = genai.AdapterConfig(*adapter) if adapter else genai.AdapterConfig()
        return config


def _take(handle, answer, now_s):
    if handle.can_read():
        for output in handle.read().values():
            answer["token_ids"] += output.generated_ids
            answer["token_s"] += [now_s] * len(output.generated_ids)


def _tensor(token_ids):
    return openvino.Tensor(np.array([token_ids], dtype=np.int64))


def main():
    # Libraries print to stderr from here on: stdout is for the protocol only.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    pipeline = Pipeline(json.loads(sys.stdin.readline()))
    out.write(json.dumps({"version": f"openvino-genai {genai.__version__}"}) + "\n")
    for line in sys.stdin:
        out.write(json.dumps({"answers": pipeline.run(json.loads(line)["requests"])}) + "\n")


if __name__ == "__main__":
    main()
