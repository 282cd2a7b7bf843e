"""A device's model on several ranks of one process, each a thread with a fake device."""

import threading

import torch

from engine.gpu.backend import assemble
from engine.models.weights import ShardedWeights, StoredWeights
from engine.rank_process import PlacedAdapters
from lora.filling import SlabFiller
from tests.engine.gpu.backends import make_config
from tests.engine.gpu.fake_device import FakeDevice
from tests.engine.gpu.recording import RecordingKernels
from tests.engine.rank_team import Team
from tests.engine.thread_ranks import ThreadRanks

_TIMEOUT_S = 60.0


def recording(device: FakeDevice, ranks: ThreadRanks) -> RecordingKernels:
    return RecordingKernels(device)


class DeviceTeam(Team):
    """Ranks of a model on fake devices.

    make_device_kernels: takes a device and its rank.   max_num_drafts: see StepLimits.
    values: fields of the engine's config.
    devices, backends, runners: one for each rank; the runners exist once `lead` has returned.
    """

    def __init__(
        self,
        config,
        model_dir,
        form,
        num_slabs,
        num_swap_slots,
        make_kernels,
        folder,
        *,
        make_device_kernels=recording,
        max_num_drafts=0,
        **values,
    ):
        super().__init__(form.layout.num_shards, folder.parent)
        self.num_swap_slots = num_swap_slots
        # The other ranks compute as soon as they are asked to, since no one waits for their events.
        self.devices = [FakeDevice(eagerness=0.3 if i == 0 else 1.0) for i in range(self.size)]
        self.runners = [None] * self.size
        self.backends = [None] * self.size
        self._together = threading.Barrier(self.size)
        values |= {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "arena_bytes": num_slabs * form.layout.slab_bytes,
            "sliding_window": config.sliding_window,
        }
        engine = make_config(self.folder, dtype="float32", **values)

        def build(index):
            torch.set_num_threads(1)
            ranks, device = self.ranks[index], self.devices[index]
            weights = ShardedWeights(StoredWeights(model_dir, torch.float32), ranks.shard)
            kernels = make_device_kernels(device, ranks)
            backend = assemble(
                engine, config, form, weights, device, kernels, ranks, max_num_drafts
            )
            device.arena = backend.slabs
            self.backends[index] = backend
            filler = SlabFiller(form, backend.slabs, shard=ranks.shard)
            self.placed[index] = PlacedAdapters(filler, folder)
            self._together.wait(_TIMEOUT_S)

        self._threads = [
            threading.Thread(target=self._build_and_follow, args=(index, build), daemon=True)
            for index in range(1, self.size)
        ]
        for thread in self._threads:
            thread.start()
        build(0)

    @property
    def arenas(self):
        return [backend.slabs for backend in self.backends]

    def _make_runner(self, index, tables, meter):
        runner = self.backends[index].make_runner(tables, meter, self.num_swap_slots)
        self.runners[index] = runner
        self._together.wait(_TIMEOUT_S)
        return runner

    def stop(self):
        """Wait until the other ranks have run all their steps and ended."""
        for steps, thread in zip(self._steps[1:], self._threads, strict=True):
            steps.put(None)
            thread.join(_TIMEOUT_S)
            assert not thread.is_alive()

    def _build_and_follow(self, index, build):
        try:
            build(index)
            runner = self._make_follower(index)
        except BaseException:
            self.ranks[index].leave()
            raise
        self._follow(index, runner)
