"""Checks whether kernels can be trusted on this machine, on a made-up layer of a model's sizes.

The results are compared with plain torch. If a token's bits must not depend on other tokens, the
same request also runs alone in one chunk, and in pieces among others.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.cpu.decoder import Decoder
from engine.cpu.inputs import InputBuilder
from engine.models.checkpoint import expert_projection_name, projection_name, router_name
from engine.models.config import DecoderConfig
from engine.models.experts import Experts
from engine.steps.batch import Batch, ScheduledRow
from engine.wire.messages import SamplingParams
from kernels.cpu.errors import Unavailable
from kernels.cpu.plain import AttentionShape, CpuKernels
from kernels.quantized import Rounding, Weight, quantize
from kernels.tiles import ADDRESS_UNIT_BYTES
from lora.batch import DeviceTables
from lora.layout import PROJECTIONS, Layout
from lora.packed import PackedForm

_VOCABULARY = 64
_TOKENS = 84
"""Tokens of a trial request: more than one tile of keys of any kernels."""
_WINDOW = 40
"""Window of the trial if the model has windows; its own would be longer than the trial."""
_EXPERTS = 2
"""Experts of the trial if the model has experts; each has the size of the model's own."""
_TILES = 2
"""Tiles of each module of the trial's adapter: rank 16."""
_REVISION = "trial"

_Part = tuple[str, int, int]
"""(request, start, end) of some tokens. Request "a" also runs alone; "b" has no adapter."""


def check_kernels(
    kernels: CpuKernels,
    reference: CpuKernels,
    config: DecoderConfig,
    shape: AttentionShape,
    *,
    tolerance: float,
    is_invariant: bool,
    rounding: Rounding | None = None,
) -> None:
    """Check kernels against others. Raises Unavailable.

    tolerance: how far logits may be from the reference's, as a share of their norm.
    is_invariant: whether a token's bits must not depend on other tokens.
    rounding: of the weights of the trial's projections.
    """
    trial = _Trial(config, shape, rounding)
    n = min(_TOKENS, shape.cos.shape[1]) - 1
    # With 65, one token of a chunk has a tile of 64 keys for itself.
    early, late = n // 12, min(65, n * 4 // 5)
    among_others: list[list[_Part]] = [
        [("b", 0, 5), ("a", 0, early), ("c", 0, n // 2)],
        [("b", 5, 6), ("c", n // 2, n // 2 + 1), ("a", early, late)],
        [("a", late, n - 1)],
        [("c", n // 2 + 1, n // 2 + 2), ("a", n - 1, n), ("b", 6, 7)],
        [("b", 7, n // 2), ("c", n // 2 + 2, n), ("a", n, n + 1)],
    ]
    found, expected = (trial.run(k, among_others) for k in (kernels, reference))
    # The condition is written so that NaN fails it, too.
    if not all(
        (found[name] - expected[name]).norm() <= tolerance * expected[name].norm()
        for name in expected
    ):
        raise Unavailable("the self-check failed: its logits are not torch's")
    if is_invariant:
        alone = trial.run(kernels, [[("a", 0, n)], [("a", n, n + 1)]])
        if not torch.equal(found["a"][-2:], alone["a"]):
            raise Unavailable("the self-check failed: a token's bits depend on who is beside it")


class _Trial:
    """A model of one layer, an adapter, and three requests."""

    def __init__(
        self, config: DecoderConfig, shape: AttentionShape, rounding: Rounding | None
    ) -> None:
        self.rounding = rounding
        self.rng = torch.Generator().manual_seed(0)
        self.config = replace(
            config,
            shape=replace(config.shape, num_layers=1),
            vocab_size=_VOCABULARY,
            tie_word_embeddings=False,
            experts=(_few(next(filter(None, config.experts), None)),),
            windows=(_WINDOW if any(config.windows) else None,),
            # The last rope: kernels that know only the first do not pass.
            ropes=replace(config.ropes, numbers=(len(config.ropes.different) - 1,)),
        )
        itemsize = shape.cos.itemsize
        self.layout = Layout(self.config.shape, itemsize, shape.block_size, itemsize)
        self.weights = self._make_weights()
        depth = self.layout.num_blocks(_TOKENS)
        self.blocks = {name: tuple(range(i, 3 * depth, 3)) for i, name in enumerate("abc")}
        self.tokens = {
            name: torch.randint(_VOCABULARY, (_TOKENS,), generator=self.rng).tolist()
            for name in "abc"
        }
        self.tables, num_slabs = self._place_adapter(first_slab=3 * depth)
        # The whole arena is random: the adapter's tiles, and old KV, which must not be seen.
        arena = 0.1 * torch.randn(num_slabs, self.layout.slab_bytes // itemsize, generator=self.rng)
        self.arena = arena.view(torch.uint8)

    @torch.inference_mode()
    def run(self, kernels: CpuKernels, steps: Sequence[Sequence[_Part]]) -> dict[str, torch.Tensor]:
        """Run the steps; return each request's logits of its parts' last tokens, [parts, vocab]."""
        model = Decoder(self.config, self.weights, kernels)
        form = PackedForm(self.layout, "float32", _REVISION)
        builder = InputBuilder(self.arena.clone(), form, lambda key: (0, self.tables))
        found: dict[str, list[torch.Tensor]] = {}
        for number, parts in enumerate(steps):
            rows = tuple(self._row(part) for part in parts)
            logits, _ = model.forward(builder.build(Batch(number, rows)))
            for row, (name, _, _) in zip(logits, parts, strict=True):
                found.setdefault(name, []).append(row)
        return {name: torch.stack(rows) for name, rows in found.items()}

    def _row(self, part: _Part) -> ScheduledRow:
        name, start, end = part
        is_base = name == "b"
        return ScheduledRow(
            request_id=name,
            token_ids=tuple(self.tokens[name][start:end]),
            start=start,
            block_ids=self.blocks[name],
            adapter_key=None if is_base else _REVISION,
            adapter_digest=None if is_base else _REVISION,
            sampling=SamplingParams(max_tokens=1),
        )

    def _place_adapter(self, first_slab: int) -> tuple[DeviceTables, int]:
        """Place tiles one after the other from a slab on; also return how many slabs are needed."""
        unit = first_slab * self.layout.units_per_slab
        table = torch.full((1, len(PROJECTIONS), _TILES), -1, dtype=torch.int32)
        for projection in self.config.shape.adapted:
            for tile in range(_TILES):
                table[0, projection, tile] = unit
                unit += self.layout.tile_bytes((0, projection)) // ADDRESS_UNIT_BYTES
        scales = torch.full((1, len(PROJECTIONS)), 0.5)
        tables = DeviceTables(_REVISION, _REVISION, table, scales)
        return tables, -(-unit // self.layout.units_per_slab)

    def _make_weights(self) -> dict[str, Weight]:
        shape, layer = self.config.shape, "model.layers.0"
        weights: dict[str, Weight] = {
            "model.embed_tokens.weight": self._randn(_VOCABULARY, shape.hidden_size),
            "lm_head.weight": self._randn(_VOCABULARY, shape.hidden_size),
            "model.norm.weight": self._randn(shape.hidden_size),
        }
        for name in self.config.norms:
            weights[f"{layer}.{name}.weight"] = self._randn(shape.hidden_size)
        for name, size in zip("qk", self.config.qk_norm_sizes or (), strict=False):
            weights[f"{layer}.self_attn.{name}_norm.weight"] = self._randn(size)
        experts = self.config.experts[0]
        for projection in range(len(PROJECTIONS)) if experts is None else shape.adapted:
            module = projection_name(0, projection)
            in_features, out_features = self.config.features(projection)
            weights[f"{module}.weight"] = self._rounded(out_features, in_features)
            if self.config.biases[projection]:
                weights[f"{module}.bias"] = self._randn(out_features)
        return weights if experts is None else weights | self._make_experts(experts)

    def _make_experts(self, experts: Experts) -> dict[str, Weight]:
        hidden, width = self.config.shape.hidden_size, experts.width
        weights: dict[str, Weight] = {
            f"{router_name(0)}.weight": self._randn(experts.count, hidden).div_(hidden**0.5)
        }
        for expert in range(experts.count):
            for projection, shape in enumerate([(width, hidden)] * 2 + [(hidden, width)], 4):
                name = f"{expert_projection_name(0, expert, projection)}.weight"
                weights[name] = self._rounded(*shape)
        return weights

    def _rounded(self, out_features: int, in_features: int) -> Weight:
        weight = self._randn(out_features, in_features).div_(in_features**0.5)
        return quantize(weight, self.rounding) if self.rounding else weight

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng)


def _few(experts: Experts | None) -> Experts | None:
    """Experts of which each token has all: rounding must not decide which ones are compared."""
    return experts and replace(experts, count=_EXPERTS, per_token=_EXPERTS)
