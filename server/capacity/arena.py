"""The memory that weights leave, in slabs, and how many requests fit into it."""

from dataclasses import dataclass

from engine.config import DEVICE_DEFAULTS
from lora.layout import Layout, default_sum_ranks
from server.capacity.hardware import Hardware
from server.capacity.sizes import ModelSizes, Quantization

_CONTEXT_BYTES = 1 << 30
"""Memory of a GPU that its driver, the kernels and the captured graphs take; an estimate."""
_LOGITS_COPIES = 3
"""Numbers of 4 bytes for each row and word of the vocabulary while a step samples."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an engine, as `chorale serve` has them.

    max_sum_ranks_per_step: None for the engine's own default.   arena_bytes: None for its default.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_sum_ranks_per_step: int | None = None
    arena_bytes: int | None = None
    memory_utilization: float = 0.9


def default_limits(kind: str) -> Limits:
    """Limits that an engine has by itself.   kind: "cpu" or "gpu"."""
    defaults = DEVICE_DEFAULTS["cpu" if kind == "cpu" else "cuda"]
    return Limits(defaults["max_num_seqs"], defaults["max_num_batched_tokens"])


@dataclass(frozen=True, slots=True)
class Arena:
    """The memory of one rank. All bytes are of one rank.

    step_bytes: taken by a step's activations and logits, an estimate on a GPU.
    adapter_slabs: slabs of one adapter.
    """

    layout: Layout
    memory_bytes: int
    weight_bytes: int
    step_bytes: int
    arena_bytes: int
    adapter_slabs: int

    @property
    def num_slabs(self) -> int:
        return max(0, self.arena_bytes) // self.layout.slab_bytes

    @property
    def fits(self) -> bool:
        """Whether weights, steps and the arena have room in the device's memory."""
        taken = self.weight_bytes + self.step_bytes + self.num_slabs * self.layout.slab_bytes
        return self.num_slabs > 0 and taken <= self.memory_bytes

    def most_requests(self, num_tokens: int, num_adapters: int) -> int:
        """Requests of so many tokens each that fit at once, beside the adapters that they use."""
        if not self.fits:
            return 0
        each, own = self.layout.num_blocks(num_tokens), self.adapter_slabs
        alone = self.num_slabs // (each + own)  # requests that share no adapter
        if alone < num_adapters:
            return alone
        return (self.num_slabs - num_adapters * own) // each


def make_arena(
    sizes: ModelSizes,
    hardware: Hardware,
    quantization: Quantization,
    num_shards: int,
    limits: Limits,
    rank: int,
) -> Arena:
    """Make the arena of one of `num_shards` ranks.   rank: of an adapter, or 0."""
    itemsize = hardware.itemsize
    shape = sizes.adapted_shape
    vocab_size = sizes.vocab_size if hardware.kind == "cpu" else 0
    layout = Layout.of(shape, itemsize, num_shards=num_shards, vocab_size=vocab_size)
    weights = sizes.weight_bytes(quantization, itemsize, num_shards)
    step = _step_bytes(sizes, hardware, num_shards, limits)
    if limits.arena_bytes is not None:
        arena = limits.arena_bytes
    elif hardware.kind == "cpu":
        arena = DEVICE_DEFAULTS["cpu"]["arena_bytes"]
    else:
        arena = int(limits.memory_utilization * hardware.memory_bytes) - weights - step
    places = {(layer, p): rank for layer in range(shape.num_layers) for p in shape.adapted}
    slabs = layout.pack(places)[1] if rank else 0
    return Arena(layout, hardware.memory_bytes, weights, step, arena, slabs)


def sum_ranks(limits: Limits, hardware: Hardware, arena: Arena, used_share: float) -> int:
    """The highest sum of ranks in a step, as engine.build.resolve_sum_ranks has it."""
    if limits.max_sum_ranks_per_step is not None:
        return limits.max_sum_ranks_per_step
    step_tokens = limits.max_num_batched_tokens if hardware.kind == "gpu" else None
    return default_sum_ranks(arena.layout, arena.weight_bytes, step_tokens, used_share)


def _step_bytes(sizes: ModelSizes, hardware: Hardware, num_shards: int, limits: Limits) -> int:
    """Activations of the largest step, its logits, and on a GPU what the driver takes."""
    s = sizes.shape
    widths = (
        3 * s.hidden_size
        + (s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads) + 3 * s.intermediate_size)
        // num_shards
    )
    activations = limits.max_num_batched_tokens * widths * hardware.itemsize
    logits = _LOGITS_COPIES * 4 * limits.max_num_seqs * sizes.vocab_size
    return activations + logits + (_CONTEXT_BYTES if hardware.kind == "gpu" else 0)
