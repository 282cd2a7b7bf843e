"""How long a step takes: the sum of its parts, each bound by its bytes or by its FLOPs.

    products      weights read once; 2 FLOPs for each weight and token
    head          the same, for the rows that choose a token
    attention     KV of every row read once; 4 FLOPs for each head's number, query and key
    lora          tiles of every adapter in the step read once; 2 FLOPs for each number and token
    elementwise   norms, gates, rotary embedding, writes of KV
    sampling      logits read once
    all_reduce    two sums over the ranks in each layer

`time = max(bytes / bandwidth, FLOPs / rate)`. A table's rates are shares of what is on paper; those
of `engine.cpu.rates` are measured, with the FLOP rate of products by the number of rows. Neither is
fitted to times of whole steps.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lora.layout import Layout
from server.capacity.hardware import BYTES_SHARE, FLOPS_SHARE, Hardware
from server.capacity.sizes import ModelSizes, Quantization

_ALL_REDUCE_S = 10e-6
"""Launch and wait of one sum over ranks on GPUs of one machine."""
_PARTS = ("products", "head", "attention", "lora", "elementwise", "sampling")
_LOGITS_BYTES = 4


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one part of a step is.

    flops_per_s: (rows, FLOP/s of a product with so many rows), rising in rows.
    call_s, row_s: time of a layer, and of each row of it, besides.
    """

    bytes_per_s: float = math.inf
    flops_per_s: tuple[tuple[int, float], ...] = ()
    call_s: float = 0.0
    row_s: float = 0.0

    def seconds(self, num_bytes: float, flops: float, rows: float = 1.0) -> float:
        """Time of a part with so many bytes and FLOPs, of products with so many rows."""
        of_flops = flops / self._flops_at(rows) if self.flops_per_s and flops else 0.0
        return max(num_bytes / self.bytes_per_s, of_flops)

    def _flops_at(self, rows: float) -> float:
        """The rate at `rows`: time, not rate, lies on straight lines between measured numbers."""
        points = self.flops_per_s
        at = bisect_left(points, (rows, 0.0))
        if at == len(points) or at == 0:
            first, rate = points[min(at, len(points) - 1)]
            return rate * rows / first if at == 0 and rows < first else rate
        (low, low_rate), (high, high_rate) = points[at - 1], points[at]
        begin, end = low / low_rate, high / high_rate
        return rows / (begin + (end - begin) * (rows - low) / (high - low))


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates of a machine by parts of a step.   step_s, row_s: of a step and of each of its rows,
    for the scheduler, its inputs and the journal.
    """

    rates: Mapping[str, Rate]
    step_s: float
    row_s: float = 0.0
    link_bytes_per_s: float = math.inf
    all_reduce_s: float = _ALL_REDUCE_S


def speed_on_paper(hardware: Hardware) -> Speed:
    """Rates of a device in the table, at the stated shares of its bandwidth and FLOPs."""
    rate = Rate(BYTES_SHARE * hardware.bytes_per_s, ((1, FLOPS_SHARE * hardware.flops_per_s),))
    return Speed(dict.fromkeys(_PARTS, rate), hardware.step_s, 0.0, hardware.link_bytes_per_s)


# Steps of an engine with a runner that computes nothing took 1.3 ms with 64 requests that decode,
# and 5.5 ms with 256, on a core of an AMD EPYC.
_MEASURED_STEP_S, _MEASURED_ROW_S = 0.0001, 0.00002


def measured_speed(rates: Mapping[str, Mapping[str, Any]]) -> Speed:
    """Rates of this machine.   rates: of one quantization, as engine.cpu.rates prints them."""
    return Speed(msgspec.convert(rates, dict[str, Rate]), _MEASURED_STEP_S, _MEASURED_ROW_S)


@dataclass(slots=True)
class StepLoad:
    """The work of a step.

    num_rows, num_choosing: its requests, and those that choose a token.   num_keys: positions whose
    KV is read, by all requests.   num_pairs: of a query and a key.   num_adapters, sum_ranks: of
    the different adapters.   adapted_tokens, rank_tokens: tokens with an adapter, and the sum of
    their ranks.
    """

    num_tokens: int = 0
    num_rows: int = 0
    num_choosing: int = 0
    num_keys: int = 0
    num_pairs: float = 0.0
    num_adapters: int = 0
    sum_ranks: int = 0
    adapted_tokens: int = 0
    rank_tokens: int = 0


class StepTimes:
    """Times of a model's steps on one of `layout.num_shards` ranks, which all take as long."""

    def __init__(
        self,
        sizes: ModelSizes,
        quantization: Quantization,
        itemsize: int,
        layout: Layout,
        speed: Speed,
    ) -> None:
        self._sizes, self._speed, self._shards = sizes, speed, layout.num_shards
        s, shards = sizes.shape, layout.num_shards
        self._layers, self._hidden, self._itemsize = s.num_layers, s.hidden_size, itemsize
        self._layer_bytes = sizes.product_bytes(quantization, itemsize) / shards
        self._head_bytes = sizes.head_bytes(quantization, itemsize)
        self._layer_weights, self._head_weights = sizes.layer_weights, sizes.head_weights
        self._behind = (
            1
            - s.hidden_size * s.head_dim * (s.num_heads + 2 * s.num_kv_heads) / self._layer_weights
        )
        self._kv_bytes = layout.kv_block_elems * layout.kv_itemsize / layout.block_size
        self._pair_flops = 4 * s.num_heads * s.head_dim * s.num_layers / shards
        self._rank_bytes = layout.bytes_per_rank
        features = [layout.features((0, p)) for p in layout.shape.adapted]
        self._rank_flops = 2 * s.num_layers * sum(map(sum, features))
        heads = s.head_dim * (3 * s.num_heads + 4 * s.num_kv_heads)
        mlp = 3 * s.intermediate_size * max(sizes.experts_per_token, 1)
        # Outputs of a token's experts are written, and read by their sum.
        whole = 6 * s.hidden_size + 2 * s.hidden_size * sizes.experts_per_token
        widths = whole + (heads + mlp) / shards
        self._elementwise_bytes = widths * itemsize

    def seconds(self, load: StepLoad) -> float:
        """Seconds of a step."""
        return sum(self.parts(load).values())

    def parts(self, load: StepLoad) -> dict[str, float]:
        """Seconds of a step by its parts."""
        rates, speed, sizes = self._speed.rates, self._speed, self._sizes
        tokens, choosing = load.num_tokens, load.num_choosing
        attention, head, lora = rates["attention"], rates["head"], rates["lora"]
        elementwise = rates["elementwise"]
        parts = {
            "products": self._products_s(tokens, choosing),
            "head": head.seconds(
                self._head_bytes if choosing else 0, 2.0 * self._head_weights * choosing, choosing
            ),
            "attention": attention.seconds(
                load.num_keys * self._kv_bytes, load.num_pairs * self._pair_flops
            ),
            "lora": lora.seconds(
                load.sum_ranks * self._rank_bytes,
                load.rank_tokens * self._rank_flops,
                load.adapted_tokens / max(load.num_adapters, 1),
            ),
            "elementwise": self._layers * (elementwise.call_s + elementwise.row_s * tokens)
            + elementwise.seconds(self._layers * tokens * self._elementwise_bytes, 0.0),
            "sampling": rates["sampling"].seconds(choosing * sizes.vocab_size * _LOGITS_BYTES, 0.0),
            "host": speed.step_s + speed.row_s * load.num_rows,
        }
        if self._shards > 1:
            share = 2 * (self._shards - 1) / self._shards
            size = share * tokens * self._hidden * self._itemsize
            each = speed.all_reduce_s + size / speed.link_bytes_per_s
            parts["all_reduce"] = 2 * self._layers * each
        return parts

    def _products_s(self, tokens: int, choosing: int) -> float:
        """All layers compute every token, but for the last one behind its attention's keys."""
        full = self._layer_s(tokens)
        last = full if tokens == choosing else self._layer_s(choosing)
        return (self._layers - self._behind) * full + self._behind * last

    def _layer_s(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        sizes, share = self._sizes, 1.0
        computed = self._layer_weights
        if sizes.num_experts:
            # Tokens choose experts alike: some of all are chosen by nobody, and not read.
            used = 1 - (1 - sizes.experts_per_token / sizes.num_experts) ** tokens
            of_experts = sizes.num_experts * sizes.mlp_weights
            share = (sizes.attention_weights + used * of_experts) / self._layer_weights
            computed = sizes.attention_weights + sizes.experts_per_token * sizes.mlp_weights
        flops = 2.0 * computed * tokens / self._shards
        return self._speed.rates["products"].seconds(self._layer_bytes * share, flops, tokens)
