"""The models whose adapters are laid out here: sizes only, no weights."""

from collections.abc import Sequence

from lora.layout import PROJECTIONS, Layout, ModelShape, Ranks

LAYOUTS = {
    "smollm2-135m float32": Layout.of(ModelShape(30, 576, 1536, 9, 3, 64), 4),
    "llama-3.1-8b bfloat16": Layout.of(ModelShape(32, 4096, 14336, 32, 8, 128), 2),
}
TARGETS = {"q,v": ("q_proj", "v_proj"), "all": PROJECTIONS}
"""Projections that have LoRA weights: PEFT's default for these models, and all of them."""


def ranks_of(layout: Layout, rank: int, targets: Sequence[str]) -> Ranks:
    """Return ranks with `rank` on each target projection of every layer."""
    indices = [PROJECTIONS.index(name) for name in targets]
    return {(layer, p): rank for layer in range(layout.shape.num_layers) for p in indices}


def slabs_of(layout: Layout, rank: int, targets: Sequence[str]) -> int:
    """Return the number of slabs that an adapter of this rank and these targets takes."""
    _, num_slabs = layout.pack(ranks_of(layout, rank, targets))
    return num_slabs


def weight_bytes(layout: Layout, rank: int, targets: Sequence[str]) -> int:
    """Bytes of A and B without padding; also the bytes of one slot of stacked tensors of `rank`."""
    widths = sum(sum(layout.shape.features(PROJECTIONS.index(name))) for name in targets)
    return layout.shape.num_layers * rank * widths * layout.itemsize
