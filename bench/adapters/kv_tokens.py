"""KV tokens that fit beside resident adapters, computed: in one arena, and beside separate slots.

Slots are reserved at the start for as many adapters as may ever be resident, however many are. The
kinder figure, `slots_exactly_as_many`, reserves one slot per resident adapter, of exactly its rank.
"""

from dataclasses import dataclass
from typing import Any

from bench.adapters.shapes import LAYOUTS, TARGETS, slabs_of, weight_bytes
from bench.experiment import Experiment
from bench.in_process import EngineFactory
from lora.layout import PROJECTIONS, Layout

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class KVTokens(Experiment):
    """The number of KV tokens that fit beside resident adapters.

    memory_gib: memory left after the weights, per shape.   resident: numbers of resident
    adapters, all of them of the same rank, each of `ranks` in turn.

    Slots are stacked tensors on all projections (see bench.adapters.memory): `max(resident)` slots
    of the largest rank. No model is run.
    """

    stack: str = "tiny"
    memory_gib: tuple[int, ...] = (4, 56)
    resident: tuple[int, ...] = (0, 8, 64)
    ranks: tuple[int, ...] = (8, 16)

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        return {
            name: {
                targets: {
                    f"rank_{rank}": [
                        self._tokens(layout, gib * _GIB, targets, rank, n) for n in self.resident
                    ]
                    for rank in self.ranks
                }
                for targets in TARGETS
            }
            for (name, layout), gib in zip(LAYOUTS.items(), self.memory_gib, strict=True)
        }

    def _tokens(
        self, layout: Layout, memory_bytes: int, targets: str, rank: int, resident: int
    ) -> dict[str, int]:
        adapter_slabs = resident * slabs_of(layout, rank, TARGETS[targets])
        reserved = max(self.resident) * weight_bytes(layout, max(self.ranks), PROJECTIONS)
        exact = resident * weight_bytes(layout, rank, PROJECTIONS)
        return {
            "resident": resident,
            "ours": max(0, memory_bytes // layout.slab_bytes - adapter_slabs) * layout.block_size,
            "slots": _kv_tokens(layout, memory_bytes - reserved),
            "slots_exactly_as_many": _kv_tokens(layout, memory_bytes - exact),
        }


def _kv_tokens(layout: Layout, size_bytes: int) -> int:
    return max(0, size_bytes) // layout.slab_bytes * layout.block_size
