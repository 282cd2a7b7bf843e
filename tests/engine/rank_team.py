"""An engine's ranks as threads of one process, for tests. Steps and adapters reach them as they
reach processes; sums go through `ThreadRanks`.
"""

import queue
import threading

import torch

from engine.batch_wire import decode
from engine.cpu.runner import ModelRunner
from engine.meter import TokenMeter
from engine.rank_group import PLACED, LeadingRunner
from engine.rank_process import PlacedAdapters
from engine.weights import ShardedWeights, open_weights
from lora.filling import SlabFiller
from tests.cpu_decoder import make_decoder
from tests.engine.thread_ranks import ThreadRanks

MAX_MODEL_LEN = 256


class RankTeam:
    """All ranks of a model, as lora.loader.OtherRanks and engine.rank_group.RankGroup.

    folder: holds the packed files, named by `lora.disk_cache.packed_path`.
    """

    def __init__(self, config, model_dir, form, num_slabs, num_swap_slots, make_kernels, folder):
        self.size = form.layout.num_shards
        self.form = form
        self._num_swap_slots = num_swap_slots
        self._ranks = ThreadRanks.group(self.size)
        self._models, self.arenas = [], []
        for ranks in self._ranks:
            weights = ShardedWeights(open_weights(model_dir, torch.float32), ranks.shard)
            model = make_decoder(config, weights, form, MAX_MODEL_LEN, make_kernels, ranks)
            self._models.append(model)
            self.arenas.append(torch.zeros(num_slabs, form.layout.slab_bytes, dtype=torch.uint8))
        self._placed = [
            PlacedAdapters(SlabFiller(form, arena, shard=ranks.shard), folder)
            for ranks, arena in list(zip(self._ranks, self.arenas, strict=True))[1:]
        ]
        self._steps = [queue.SimpleQueue() for _ in self._placed]
        self._num_placings = 0
        for index in range(1, self.size):
            meter = TokenMeter(folder.parent / f"meter-{index}")
            runner = self._runner(index, self._placed[index - 1].tables, meter)
            work = (self._steps[index - 1], runner, self._ranks[index])
            threading.Thread(target=_follow, args=work, daemon=True).start()

    def lead(self, tables, meter):
        """Make the runner of the first rank."""
        return LeadingRunner(self._runner(0, tables, meter), self, tables)

    def send_step(self, numbers):
        for steps in self._steps:
            steps.put(list(numbers))

    def begin_placing(self, digest, slabs):
        self._num_placings += 1
        answers = [placed.place(self._num_placings, digest, slabs) for placed in self._placed]
        assert set(answers) == {PLACED}
        return self._num_placings

    def end_placing(self, number):
        return None

    def _runner(self, index, tables, meter):
        return ModelRunner(
            self._models[index], self.arenas[index], self.form, tables, meter, self._num_swap_slots
        )


def _follow(steps, runner, ranks):
    """Launch and collect a rank's steps, as engine.rank_process does."""
    try:
        while True:
            runner.launch(decode(steps.get()))
            runner.collect()
    except BaseException:
        ranks.leave()
        raise
