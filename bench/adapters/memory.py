"""Bytes per adapter at mixed ranks, computed: tiles in slabs, and slots of stacked tensors.

vLLM (on all projections) and SGLang (on the projections named as targets) allocate stacked tensors,
`[slots, largest rank, in]` and `[slots, out, largest rank]` for every projection.
"""

from dataclasses import dataclass
from typing import Any

from bench.adapters.shapes import LAYOUTS, TARGETS, slabs_of, weight_bytes
from bench.experiment import Experiment
from bench.in_process import EngineFactory
from bench.report import ratio, rounded
from lora.layout import PROJECTIONS, Layout


@dataclass(frozen=True, kw_only=True)
class Memory(Experiment):
    """Bytes that adapters of mixed ranks take.

    ranks: (rank, number of adapters of that rank); each adapter has a slot. No model is run.
    """

    stack: str = "tiny"
    ranks: tuple[tuple[int, int], ...] = ((8, 24), (16, 6), (64, 2))

    def measure(self, factory: EngineFactory) -> dict[str, Any]:
        return {
            name: {targets: self._compare(layout, targets) for targets in TARGETS}
            for name, layout in LAYOUTS.items()
        }

    def _compare(self, layout: Layout, target_name: str) -> dict[str, Any]:
        targets = TARGETS[target_name]
        num_adapters = sum(count for _, count in self.ranks)
        largest = max(rank for rank, _ in self.ranks)
        needed = sum(weight_bytes(layout, rank, targets) * n for rank, n in self.ranks)
        num_slabs = sum(slabs_of(layout, rank, targets) * n for rank, n in self.ranks)
        ours = num_slabs * layout.slab_bytes
        slot_on_targets = weight_bytes(layout, largest, targets)
        slot_on_all = weight_bytes(layout, largest, PROJECTIONS)
        return {
            "weights_bytes_per_adapter": needed // num_adapters,
            "ours_bytes_per_adapter": ours // num_adapters,
            "ours_padding_share": rounded(1 - needed / ours),
            "slot_on_targets_bytes": slot_on_targets,
            "slot_on_all_projections_bytes": slot_on_all,
            "slots_on_targets_to_ours": ratio(slot_on_targets * num_adapters, ours),
            "slots_on_all_projections_to_ours": ratio(slot_on_all * num_adapters, ours),
        }
