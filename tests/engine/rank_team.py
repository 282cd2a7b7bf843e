"""An engine's ranks as threads of one process, for tests. Steps and adapters reach them as they
reach processes; sums go through `ThreadRanks`.
"""

import queue
import threading

import torch

from engine.cpu.runner import ModelRunner
from engine.models.weights import ShardedWeights, open_weights
from engine.rank_process import PlacedAdapters
from engine.ranks.batch_row import decode
from engine.ranks.group import LeadingRunner
from engine.steps.meter import TokenMeter
from lora.filling import SlabFiller
from tests.cpu_decoder import make_decoder
from tests.engine.thread_ranks import ThreadRanks

MAX_MODEL_LEN = 256


class Team:
    """Ranks of a model, as lora.loader.OtherRanks and engine.ranks.group.RankGroup. The first is
    led by the engine; the others follow, each in a thread.

    folder: the engine's, where each rank has a file for its meter.
    placed: adapters of each rank.   `_make_runner` makes a rank's runner.
    """

    def __init__(self, size, folder):
        self.size, self.folder = size, folder
        self.ranks = ThreadRanks.group(size)
        self.placed = [None] * size
        self._steps = [queue.SimpleQueue() for _ in self.ranks]
        self._num_placings = 0

    def lead(self, tables, meter):
        """Make the runner of the first rank."""
        return LeadingRunner(self._make_runner(0, tables, meter), self, tables)

    def send_step(self, step):
        for steps in self._steps[1:]:
            steps.put(step)

    def begin_placing(self, digest, slabs):
        self._num_placings += 1
        answers = [own.place(self._num_placings, digest, slabs) for own in self.placed[1:]]
        assert set(answers) == {None}
        return self._num_placings

    def end_placing(self, number):
        return None

    def _make_follower(self, index):
        meter = TokenMeter(self.folder / f"meter-{index}")
        return self._make_runner(index, self.placed[index].tables, meter)

    def _follow(self, index, runner):
        """Launch and collect steps until one is None, as engine.rank_process does."""
        try:
            num_under_way = 0
            while (step := self._steps[index].get()) is not None:
                runner.launch(decode(step))
                num_under_way += 1
                if num_under_way > runner.lag:
                    assert runner.collect().token_ids == ()
                    num_under_way -= 1
        except BaseException:
            self.ranks[index].leave()
            raise


class RankTeam(Team):
    """Ranks of a model on the CPU.

    folder: holds the packed files, named by `lora.disk_cache.packed_path`.
    """

    def __init__(self, config, model_dir, form, num_slabs, num_swap_slots, make_kernels, folder):
        super().__init__(form.layout.num_shards, folder.parent)
        self.form = form
        self._num_swap_slots = num_swap_slots
        self._models, self.arenas = [], []
        for ranks in self.ranks:
            weights = ShardedWeights(open_weights(model_dir, torch.float32), ranks.shard)
            model = make_decoder(config, weights, form, MAX_MODEL_LEN, make_kernels, ranks)
            self._models.append(model)
            arena = torch.zeros(num_slabs, form.layout.slab_bytes, dtype=torch.uint8)
            self.arenas.append(arena)
            filler = SlabFiller(form, arena, shard=ranks.shard)
            self.placed[ranks.shard.index] = PlacedAdapters(filler, folder)
        for index in range(1, self.size):
            # A runner that swaps writes to the arena as it is made, before any adapter is there.
            work = index, self._make_follower(index)
            threading.Thread(target=self._follow, args=work, daemon=True).start()

    def _make_runner(self, index, tables, meter):
        return ModelRunner(
            self._models[index], self.arenas[index], self.form, tables, meter, self._num_swap_slots
        )
