"""`python -m engine.cpu.rates`: measures how fast this machine computes the parts of a step.

It reads {"config", "quantizations", "threads"} as JSON from its input, with the content of a
config.json, and prints {"bytes_per_s", "rates": {quantization: {part: {"bytes_per_s",
"flops_per_s": [[rows, rate], ..], "call_s", "row_s"}}}}. Every part is the product's own kernel at
the model's own widths, over so many different weights and blocks that no cache holds them. No
whole step is timed, so that plans of whole steps can be compared with what an engine does.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from engine.config import EngineConfig
from engine.cpu.choice import choose_kernels
from engine.cpu.decoder import attention_shape
from engine.cpu.inputs import InputBuilder
from engine.models.config import DecoderConfig
from engine.models.rounding import WeightRounding
from engine.steps.batch import Batch, ScheduledRow
from engine.steps.sampler import choose
from engine.wire.messages import SamplingParams
from kernels.cpu.plain import CpuKernels, Linear
from kernels.cpu.work import AdapterRuns, StepWork
from kernels.quantized import Rounding, quantize
from lora.layout import PROJECTIONS, Layout, ModelShape
from lora.packed import PackedForm
from lora.sites import site_of

_REPEATS = 3
_CACHED_BYTES = 64 << 20
"""Size of the different memory that a measurement goes through; the last cache is smaller."""
_MOST_WEIGHTS = 1 << 25
"""Weights of a layer beyond which its products have fewer outputs, which takes less time."""
_MOST_LAYERS = 16
_ARITHMETIC_ROWS = 32
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_HEAD_ROWS = (1, 4, 16, 32)
_CONTEXT = 256
_RANK, _ADAPTERS = 16, 4
_FUSED = ((0, 1, 2), (3,), (4, 5), (6,))

Rate = dict[str, Any]
Clock = Callable[[], float]


def main() -> None:
    job = json.load(sys.stdin)
    sys.stdout.write(json.dumps(measure_rates(**job)) + "\n")


def measure_rates(
    config: Mapping[str, Any], quantizations: Sequence[str | None], threads: int
) -> dict[str, Any]:
    """Measure the parts for each quantization of weights; "float" names the one of None.

    Raises UnsupportedModel.
    """
    torch.set_num_threads(threads)
    model = DecoderConfig.parse(dict(config))
    # On one thread the time of other processes need not count.
    clock = time.process_time if threads == 1 else time.perf_counter
    with torch.inference_mode():
        shared = _Parts(model, None, threads, clock).shared_rates()
        rates = {
            name or "float": _Parts(model, name, threads, clock).product_rates() | shared
            for name in quantizations
        }
        return {"bytes_per_s": _copied_per_s(clock), "rates": rates}


class _Parts:
    """The parts of a step with weights of one quantization.

    layers: of which every part has its own weights or blocks.
    """

    def __init__(
        self, model: DecoderConfig, quantization: str | None, threads: int, clock: Clock
    ) -> None:
        self.shape: ModelShape = replace(model.shape, intermediate_size=model.mlp_width)
        self.vocab_size = model.vocab_size
        self.layout = Layout.of(model.shape, 4)
        self.rounding = WeightRounding.of(quantization)
        length = 2 * _CONTEXT
        attention = attention_shape(
            model.at_length(length), self.layout.block_size, length, torch.float32
        )
        config = _engine_config(quantization, threads)
        rounding = self.rounding.projections
        self.kernels: CpuKernels = choose_kernels(config, model, attention, rounding=rounding)
        self._seconds = partial(_seconds, clock)

    def product_rates(self) -> dict[str, Rate]:
        """Rates of the parts that depend on the quantization."""
        return {"products": self._products(), "head": self._head()}

    def shared_rates(self) -> dict[str, Rate]:
        """Rates of the other parts."""
        measured = {"elementwise": self._elementwise(), "attention": self._attention()}
        return measured | {"lora": self._lora(), "sampling": self._sampling()}

    def _products(self) -> Rate:
        s = self.shape
        widths = [(s.features(fused[0])[0], sum(s.features(p)[1] for p in fused)) for fused in
                  _FUSED if all(s.features(fused[0]))]  # fmt: skip
        size = sum(width_in * width_out for width_in, width_out in widths)
        share = min(1.0, _MOST_WEIGHTS / size)
        cut = [(width_in, max(64, int(width_out * share))) for width_in, width_out in widths]
        bits = self.rounding.projections.bits if self.rounding.projections else 32
        num_layers = min(s.num_layers, 1 + 8 * _CACHED_BYTES // (bits * int(size * share)))
        return self._rate_of_rows(self.rounding.projections, cut, num_layers, _ROWS)

    def _head(self) -> Rate:
        hidden = self.shape.hidden_size
        num_outputs = min(self.vocab_size, _MOST_WEIGHTS // hidden)
        return self._rate_of_rows(self.rounding.head, [(hidden, num_outputs)], 2, _HEAD_ROWS)

    def _rate_of_rows(
        self,
        rounding: Rounding | None,
        shapes: Sequence[tuple[int, int]],
        num_layers: int,
        counts: Sequence[int],
    ) -> Rate:
        """FLOP/s by number of rows.   shapes: inputs and outputs of a layer's products."""
        weights = [torch.randn(num_outputs, num_inputs) for num_inputs, num_outputs in shapes]
        stored = [quantize(weight, rounding) if rounding else weight for weight in weights]
        # Each layer packs its own copy.
        layers = [[self.kernels.linear(w, None) for w in stored] for _ in range(num_layers)]

        def run(inputs: Sequence[torch.Tensor], some: Sequence[Sequence[Linear]]) -> None:
            for layer in some:
                for linear, x in zip(layer, inputs, strict=True):
                    linear(x)

        rates = []
        for count in counts:
            # Many rows are bound by arithmetic, whether or not a cache holds the weights.
            some = layers if count < _ARITHMETIC_ROWS else layers[:4]
            inputs = [torch.randn(count, num_inputs) for num_inputs, _ in shapes]
            flops = 2.0 * count * len(some) * sum(a * b for a, b in shapes)
            rates.append((count, flops / self._seconds(partial(run, inputs, some))))
        return {"flops_per_s": rates}

    def _elementwise(self) -> Rate:
        """Norms, gates, and rotary embedding with the writes of KV, which attention begins with."""
        s, calls = self.shape, 8
        q_width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        norm = torch.ones(s.hidden_size)
        slabs = self._slabs(max(_ROWS), 1)

        def run(count: int) -> float:
            x, delta = torch.randn(count, s.hidden_size), torch.randn(count, s.hidden_size)
            gate_up = torch.randn(count, 2 * max(s.intermediate_size, 1))
            qkv = torch.randn(count, q_width)
            work = self._work(slabs, [(0, 1)] * count)

            def steps() -> None:
                for _ in range(calls):
                    self.kernels.rms_norm(x, norm, 1e-6, delta)
                    self.kernels.rms_norm(x, norm, 1e-6, delta)
                    self.kernels.gated(gate_up, "silu")
                    self.kernels.attention(qkv, 0, work)

            return self._seconds(steps) / calls

        one, many = run(1), run(max(_ROWS))
        row_s = max(0.0, (many - one) / (max(_ROWS) - 1))
        return {"call_s": max(0.0, one - row_s), "row_s": row_s}

    def _attention(self) -> Rate:
        """Decodes read the keys and values of their rows; prefills compute with those of one."""
        s = self.shape
        kv_bytes = 2 * s.num_kv_heads * s.head_dim * 4
        rows = 8
        num_layers = max(1, min(_MOST_LAYERS, s.num_layers))
        slabs = self._slabs(rows * (1 + _CONTEXT // self.layout.block_size), num_layers)
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def run(ranges: Sequence[tuple[int, int]]) -> float:
            """Seconds of one layer.   ranges: tokens of each row."""
            qkv = torch.randn(sum(end - start for start, end in ranges), width)
            work = self._work(slabs, ranges)

            def layers() -> None:
                for layer in range(num_layers):
                    self.kernels.attention(qkv, layer, work)

            return self._seconds(layers) / num_layers

        decode = run([(_CONTEXT - 1, _CONTEXT)] * rows) - run([(0, 1)] * rows)
        queries = _CONTEXT // 2
        prefill = run([(queries, _CONTEXT)]) - run([(0, 1)] * queries)
        pairs = queries * (queries + (queries + 1) / 2)
        flops = 4.0 * pairs * s.num_heads * s.head_dim
        return {
            "bytes_per_s": rows * (_CONTEXT - 1) * kv_bytes / max(decode, 1e-9),
            "flops_per_s": [(1, flops / max(prefill, 1e-9))],
        }

    def _slabs(self, num_slabs: int, num_layers: int) -> torch.Tensor:
        """Blocks of so many layers, without NaN.   Result: [slabs, elements]."""
        s = self.shape
        elements = num_layers * 2 * s.num_kv_heads * s.head_dim * self.layout.block_size
        return torch.randn(num_slabs, elements)

    def _work(self, slabs: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> StepWork:
        """Rows that compute tokens [start, end) of sequences with blocks of their own."""
        rows: list[ScheduledRow] = []
        first = 0
        for start, end in ranges:
            own = range(first, first + self.layout.num_blocks(end))
            rows.append(ScheduledRow("", (0,) * (end - start), start, tuple(own)))
            first = own.stop
        form = PackedForm(self.layout, "float32", "")
        arena = slabs.view(torch.uint8)
        return InputBuilder(arena, form).build(Batch(0, tuple(rows))).work

    def _lora(self) -> Rate:
        """Products with adapters: of one token each, which read tiles, and of runs of tokens."""
        layout = self.layout
        num_layers = min(_MOST_LAYERS, layout.shape.num_layers)
        places = {(layer, p): _RANK for layer in range(num_layers) for p in layout.shape.adapted}
        tiles, num_slabs = layout.pack(places)
        arena = torch.randn(_ADAPTERS * num_slabs, layout.slab_bytes // 4)
        tables = []
        for adapter in range(_ADAPTERS):
            table = torch.full((num_layers, len(PROJECTIONS), _RANK // 8), -1, dtype=torch.int32)
            for t in tiles:
                slab = adapter * num_slabs + t.slab
                address = slab * layout.units_per_slab + t.offset_bytes // 256
                table[t.layer, t.projection, t.index] = address
            tables.append(table)
        sites = [site_of(layout.shape, layer, fused) for layer in range(num_layers)
                 for fused in _FUSED if fused[0] in layout.shape.adapted]  # fmt: skip
        features = sum(sum(layout.features((0, p))) for p in layout.shape.adapted)
        tokens_rates = []
        for tokens in (1, 8, 32):
            bounds = [(a * tokens, (a + 1) * tokens) for a in range(_ADAPTERS)]
            runs = AdapterRuns(
                arena, torch.tensor(bounds, dtype=torch.int32), tuple(tables),
                tuple(torch.ones(num_layers, len(PROJECTIONS)) for _ in tables),
            )  # fmt: skip
            seconds = self._seconds(partial(self._add, sites, runs, tokens * _ADAPTERS))
            flops = 2.0 * tokens * _ADAPTERS * _RANK * features * num_layers
            tokens_rates.append((tokens, flops / seconds))
        return {"flops_per_s": tokens_rates}

    def _add(self, sites: Sequence[Any], runs: AdapterRuns, num_tokens: int) -> None:
        for site in sites:
            x = torch.empty(num_tokens, site.in_features).fill_(0.5)
            y = torch.empty(num_tokens, sum(site.out_features))
            self.kernels.add_lora(y, x, site, runs)

    def _sampling(self) -> Rate:
        count = 8
        logits = torch.randn(count, self.vocab_size)
        rows = [_greedy_row(number) for number in range(count)]
        return {"bytes_per_s": logits.nbytes / self._seconds(lambda: choose(logits, rows))}


def _seconds(clock: Clock, run: Callable[[], object]) -> float:
    """Median of a few runs, after one that fills caches and makes buffers."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        start = clock()
        run()
        seconds.append(clock() - start)
    return max(median(seconds), 1e-9)


def _copied_per_s(clock: Clock) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(2 * _CACHED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(clock, lambda: target.copy_(source))


def _greedy_row(number: int) -> ScheduledRow:
    return ScheduledRow(
        request_id=str(number),
        token_ids=(0,),
        start=0,
        block_ids=(0,),
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
    )


def _engine_config(quantization: Any, threads: int) -> EngineConfig:
    """Settings of an engine with the kernels to be measured."""
    names = ("data_dir", "model_dir", "base_revision", "vocabulary_path", "adapter_cache_dir")
    unused: dict[str, Any] = dict.fromkeys((*names, "fetcher_socket"), "")
    return EngineConfig(
        **unused, eos_token_ids=(), dtype="float32", threads=threads, quantization=quantization
    )


if __name__ == "__main__":
    main()
