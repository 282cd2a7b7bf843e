"""The torch reference kernels on a fake device, to which they report the slabs they touch."""

import torch

from kernels import reference
from kernels.block import adapter_blocks, places_of
from kernels.tiles import ADDRESS_UNIT_BYTES
from kernels.work import AttentionWork, Decode, Delta, LoRAWork, Site
from tests.engine.gpu.fake_device import FakeDevice


class RecordingKernels:
    """kernels.reference, reporting the slabs that the inputs name when a kernel runs."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def __getattr__(self, name):
        return getattr(reference, name)

    def rope_store_kv(self, qkv, kv, cos, sin, positions, slots, finite, norms, delta, *scales):
        written = slots[slots >= 0] // kv.shape[3]
        self.device.touch(set(written.tolist()), is_write=True, what="KV written")
        self._expanded(delta)
        reference.rope_store_kv(qkv, kv, cos, sin, positions, slots, finite, norms, delta, *scales)

    def decode_attention(self, out, q, kv, work, window=None, *scores):
        for decode in (Decode(*ints) for ints in work.decodes.tolist()):
            if decode.num_sums:
                self._attended(kv, work, decode.block_start, decode.length, 1, window)
        reference.decode_attention(out, q, kv, work, window, *scores)

    def prefill_attention(self, out, q, kv, work, window=None, *scores):
        rows = work.prefill_items[: int(work.num_prefill_items), 0].unique()
        for row in rows.tolist():
            num_queries = int(work.query_starts[row + 1] - work.query_starts[row])
            start, length = int(work.block_starts[row]), int(work.seq_lens[row])
            self._attended(kv, work, start, length, num_queries, window)
        reference.prefill_attention(out, q, kv, work, window, *scores)

    def shrink(self, x, work, site):
        self._applied(work, site, "A read")
        return reference.shrink(x, work, site)

    def expand(self, y, delta):
        self._expanded(delta)
        reference.expand(y, delta)

    def gated(self, gate_up, activation, delta=None):
        self._expanded(delta)
        return reference.gated(gate_up, activation, delta)

    def copy_slabs(self, target, target_ids, source, source_ids):
        for memory, ids, is_write in ((source, source_ids, False), (target, target_ids, True)):
            if memory.data_ptr() == self.device.arena.data_ptr():
                self.device.touch(set(ids.tolist()), is_write, "swap")
        reference.copy_slabs(target, target_ids, source, source_ids)

    def _attended(
        self,
        kv: torch.Tensor,
        work: AttentionWork,
        block_start: int,
        length: int,
        num_queries: int,
        window: int | None,
    ) -> None:
        """Report the KV blocks that the last queries of `length` positions attend to within their
        window.
        """
        first = max(0, length - num_queries + 1 - (window or length)) // kv.shape[3]
        end = -(-length // kv.shape[3])
        blocks = work.blocks[block_start + first : block_start + end].tolist()
        self.device.touch(set(blocks), is_write=False, what="KV read")

    def _expanded(self, delta: Delta | None) -> None:
        if delta is not None:
            self._applied(delta.work, delta.site, "B read")

    def _applied(self, work: LoRAWork, site: Site, what: str) -> None:
        slab_bytes = self.device.arena.shape[1]
        for block in adapter_blocks(work):
            for number in range(len(site.projections)):
                places = places_of(work, site, block, number)
                slabs = {p * ADDRESS_UNIT_BYTES // slab_bytes for p in places if p >= 0}
                self.device.touch(slabs, is_write=False, what=what)
