"""A random Llama on a device, assembled as the engine does it, and driven step by step."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.adapters import BASE_REVISION, fill_tiles, make_form, place
from bench.gpu.machine import Machine
from bench.gpu.steps import deal_blocks
from engine.config import EngineConfig
from engine.gpu.backend import assemble
from engine.gpu.linear import Fp8Linear, Linear, SideBySide
from engine.gpu.runner import GpuRunner
from engine.models.checkpoint import projection_name
from engine.models.config import DecoderConfig
from engine.requests.request import PENDING_TOKEN
from engine.steps.batch import Batch, ScheduledRow, StepTokens
from engine.steps.meter import TokenMeter
from kernels.gpu import ops
from lora.batch import DeviceTables
from lora.layout import Layout, ModelShape

_WARM_UP = 4


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine under test.

    adapter_slabs: slabs of the arena for adapters, before the slabs for KV.   kv_blocks: KV blocks
    of each row.
    """

    shape: ModelShape
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    adapter_slabs: int
    kv_blocks: int


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step. step: mean time when each step is launched before the previous one is
    collected.   alone: median time of steps one after the other.   launch, collect: the host's part
    of a step alone; collect starts when the device is done.
    """

    step: float
    alone: float
    launch: float
    collect: float


class EngineUnderTest:
    """An engine without scheduler. capture_s: time to capture all graphs and to allocate the step's
    buffers.   runner_bytes: device memory of both.   blocks: slabs of each row's KV.
    """

    def __init__(
        self,
        machine: Machine,
        sizes: EngineSizes,
        switches: Mapping[str, Any],
        folder: Path,
    ) -> None:
        self.machine, self.sizes = machine, sizes
        device = machine.new_device()
        self._warm_up = machine.pick(_WARM_UP, 1)
        self.layout = Layout.of(sizes.shape, machine.dtype.itemsize)
        self.form = make_form(machine, self.layout)
        config = replace(_engine_config(machine, sizes, self.layout, folder), **switches)
        model = DecoderConfig.parse(llama_config(sizes.shape, machine.vocab_size))
        weights = make_random_weights(machine, sizes.shape, machine.vocab_size)
        backend = assemble(config, model, self.form, weights, device, ops)
        del weights
        machine.free_memory()
        free_before, _ = machine.memory_bytes
        start = time.perf_counter()
        runner = backend.make_runner(self._find, TokenMeter(folder / "meter"), 0)
        assert isinstance(runner, GpuRunner)
        self.runner = runner
        self.capture_s = time.perf_counter() - start
        self.runner_bytes = free_before - machine.memory_bytes[0]
        self._tables: Mapping[str, DeviceTables] = {}
        self.blocks = deal_blocks(sizes.adapter_slabs, sizes.max_num_seqs, sizes.kv_blocks)
        fill_tiles(backend.slabs[: sizes.adapter_slabs], self.layout, machine.dtype)
        for layer in range(sizes.shape.num_layers):
            part = runner.kv[sizes.adapter_slabs :, layer]
            part.copy_(machine.randn(*part.shape))

    def _find(self, key: str) -> tuple[int, DeviceTables]:
        return 0, self._tables[key]

    def use_adapters(self, ranks: Sequence[int]) -> list[str]:
        """Place adapters of these ranks and return their digests. They use the same random tiles as
        the adapters before them.
        """
        tables = place(self.form, ranks, self.machine.there)
        self._tables = {t.digest: t for t in tables}
        return list(self._tables)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: all projections and the language model head."""
        model = self.runner.model
        linears = [
            x for one in model.layers for x in (one.qkv, one.o, one.mlp.gate_up, one.mlp.down)
        ]
        return sum(map(_bytes_of, (model.lm_head, *linears)))

    def step(self, rows: tuple[ScheduledRow, ...]) -> StepTokens:
        self.runner.launch(Batch(1, rows))
        return self.runner.collect()

    def logits(self, num_rows: int) -> torch.Tensor:
        """Return the logits of the newest step."""
        device = self.runner.device
        device.synchronize(device.record(device.compute))
        return self.runner.out.logits[:num_rows].clone()

    def times(self, rows: tuple[ScheduledRow, ...], num_steps: int, grows: bool) -> StepTimes:
        """Time steps. grows: rows advance by one token with each step."""
        numbers = range(num_steps + self._warm_up + 1)
        batches = [Batch(1 + n, _later(rows, n) if grows else rows) for n in numbers]
        together = self._overlapped(batches)
        apart = [self._alone(batch) for batch in batches[1:]][self._warm_up - 1 :]
        alone, launch, collect = (statistics.median(column) for column in zip(*apart, strict=True))
        return StepTimes(together, alone, launch, collect)

    def _overlapped(self, batches: Sequence[Batch]) -> float:
        """Return the mean seconds of a step when each is launched before the last is collected."""
        runner = self.runner
        collected_s = []
        runner.launch(batches[0])
        for batch in batches[1:]:
            runner.launch(batch)
            runner.collect()
            collected_s.append(time.perf_counter())
        runner.collect()
        steady = collected_s[self._warm_up - 1 :]
        return (steady[-1] - steady[0]) / (len(steady) - 1)

    def _alone(self, batch: Batch) -> tuple[float, float, float]:
        """Return the seconds (whole, launch, collect) of one step."""
        runner, device = self.runner, self.runner.device
        start = time.perf_counter()
        runner.launch(batch)
        launched = time.perf_counter()
        device.synchronize(device.record(device.compute))
        done = time.perf_counter()
        runner.collect()
        end = time.perf_counter()
        return end - start, launched - start, end - done


def _bytes_of(linear: Linear) -> int:
    """Bytes of the weights that every call of a product reads."""
    if isinstance(linear, SideBySide):
        return sum(map(_bytes_of, linear.parts))
    scale_bytes = linear.scale.nbytes if isinstance(linear, Fp8Linear) else 0
    return linear.weight.nbytes + scale_bytes


def _later(rows: tuple[ScheduledRow, ...], steps: int) -> tuple[ScheduledRow, ...]:
    """Return decodes as they are `steps` steps later: their token is the one then pending."""
    if steps == 0:
        return rows
    return tuple(
        row._replace(token_ids=(PENDING_TOKEN,), start=row.start + steps, num_output_tokens=steps)
        for row in rows
    )


def _engine_config(
    machine: Machine, sizes: EngineSizes, layout: Layout, folder: Path
) -> EngineConfig:
    num_slabs = sizes.adapter_slabs + sizes.max_num_seqs * sizes.kv_blocks
    return EngineConfig(
        data_dir=str(folder),
        model_dir="",
        base_revision=BASE_REVISION,
        vocabulary_path="",
        eos_token_ids=(),
        adapter_cache_dir="",
        fetcher_socket="",
        device="cuda",
        dtype=machine.dtype_name,
        arena_bytes=num_slabs * layout.slab_bytes,
        threads=1,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
    )


def llama_config(shape: ModelShape, vocab_size: int) -> dict[str, Any]:
    """Return the entries of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocab_size,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }


def make_random_weights(machine: Machine, shape: ModelShape, vocab: int) -> dict[str, torch.Tensor]:
    """Return random weights on the device, by their Hugging Face names. vocab: its size."""
    hidden = shape.hidden_size
    weights = {
        "model.embed_tokens.weight": machine.randn(vocab, hidden),
        "lm_head.weight": machine.randn(vocab, hidden, std=hidden**-0.5),
        "model.norm.weight": torch.ones(hidden, dtype=machine.dtype, device=machine.there),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = weights["model.norm.weight"].clone()
        for number in shape.adapted:
            (inputs, outputs), name = shape.features(number), projection_name(layer, number)
            weights[f"{name}.weight"] = machine.randn(outputs, inputs, std=inputs**-0.5)
    return weights
