"""A device's model over several ranks in one process: a thread and a fake device for each."""

import threading
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.gpu.backend import assemble
from engine.journal import Journal
from engine.meter import TokenMeter
from engine.models.config import DecoderConfig
from engine.scheduler import Scheduler
from engine.swap import PreemptionCosts, SwapSpace
from engine.weights import ShardedWeights, StoredWeights, load_config
from lora.arena import Arena
from lora.batch import DeviceTables
from lora.layout import Layout
from lora.loads import Loaded
from lora.manager import AdapterManager
from lora.packed import PackedForm
from tests.engine.fakes import FakeLoader
from tests.engine.gpu.backends import make_config
from tests.engine.gpu.fake_device import FakeDevice
from tests.engine.gpu.recording import RecordingKernels
from tests.engine.thread_ranks import ThreadRanks
from tests.tiny_models import packed_adapter

_TIMEOUT_S = 60.0


def recording(device: FakeDevice, ranks: ThreadRanks) -> RecordingKernels:
    return RecordingKernels(device)


def make_form(config: DecoderConfig, size: int) -> PackedForm:
    return PackedForm(Layout.of(config.shape, 4, num_shards=size), "float32", "base-1")


class Rank:
    """What one of them computes on.   slabs: its arena.   tables: its adapters', by key."""

    def __init__(
        self, ranks: ThreadRanks, model_dir, num_slabs: int, num_swap_slots: int, make_kernels
    ) -> None:
        # Only the first one's is late: another one computes as soon as it is asked to, since nobody
        # waits for it.
        first = ranks.shard.index == 0
        self.ranks, self.device = ranks, FakeDevice(eagerness=0.3 if first else 1.0)
        self.kernels = make_kernels(self.device, ranks)
        self.tables: dict[str, tuple[int, DeviceTables]] = {}
        self.model_dir, self.num_slabs, self.num_swap_slots = model_dir, num_slabs, num_swap_slots

    def build(self, folder, tables, **values: object) -> None:
        """On every rank at once: steps are tried out, and graphs captured."""
        torch.set_num_threads(1)
        shard = self.ranks.shard
        model_config = DecoderConfig.parse(load_config(self.model_dir))
        form = make_form(model_config, shard.size)
        values |= {"arena_bytes": self.num_slabs * form.layout.slab_bytes}
        config = make_config(
            folder, dtype="float32", sliding_window=model_config.sliding_window, **values
        )
        weights = ShardedWeights(StoredWeights(self.model_dir, torch.float32), shard)
        backend = assemble(
            config, model_config, form, weights, self.device, self.kernels, self.ranks
        )
        self.slabs = self.device.arena = backend.slabs
        self.meter = folder / f"meter-{shard.index}"
        meter = TokenMeter(self.meter)
        self.runner = backend.make_runner(tables, meter, self.num_swap_slots)


@dataclass(frozen=True)
class _Task:
    """A step for another rank, and the adapters' tables of that rank."""

    batch: object
    tables: dict[str, tuple[int, DeviceTables]]


class Followers:
    """Threads for all ranks but the first; they do the steps that they are given, in order."""

    def __init__(self, ranks: list[Rank], folder, **values: object) -> None:
        self.ranks = ranks
        self.tasks = [SimpleQueue() for _ in ranks]
        self.errors: list[BaseException] = []
        self.threads = [
            threading.Thread(target=self._follow, args=(rank, tasks, folder, values), daemon=True)
            for rank, tasks in zip(ranks, self.tasks, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _follow(self, rank: Rank, tasks: SimpleQueue, folder, values) -> None:
        try:
            rank.build(folder, lambda key: rank.tables[key], **values)
            under_way = 0
            while (task := tasks.get()) is not None:
                if under_way > rank.runner.lag:
                    assert rank.runner.collect().token_ids == ()
                    under_way -= 1
                rank.tables = task.tables
                rank.runner.launch(task.batch)
                under_way += 1
        except BaseException as error:
            self.errors.append(error)
            rank.ranks._barrier.abort()

    def give(self, number: int, task: _Task | None) -> None:
        self.tasks[number].put(task)

    def stop(self) -> None:
        for number, thread in enumerate(self.threads):
            self.give(number, None)
            thread.join(_TIMEOUT_S)
        if self.errors:
            raise self.errors[0]


class RankedRunner:
    """The first rank's runner; the others are given every step before it begins."""

    def __init__(self, rank: Rank, followers: Followers, loader: "RankedLoader") -> None:
        self.rank, self.followers, self.loader = rank, followers, loader
        self.lag = rank.runner.lag
        self.batches = []

    def launch(self, batch) -> None:
        self.batches.append(batch)
        for number in range(len(self.followers.ranks)):
            tables = {
                row.adapter_key: (
                    row.adapter_generation,
                    self.loader.placed[row.adapter_key][number + 1],
                )
                for row in batch.rows
                if row.adapter_key
            }
            self.followers.give(number, _Task(batch, tables))
        self.rank.runner.launch(batch)

    def collect(self):
        return self.rank.runner.collect()


class RankedLoader(FakeLoader):
    """Packs for real, and places every rank's part, all at once.

    objects: canonical ones by digest.   placed: tables of all ranks, by key.
    """

    def __init__(self, ranks: list[Rank], form: PackedForm, objects, folder) -> None:
        super().__init__()
        self.ranks, self.form, self.objects, self.folder = ranks, form, objects, folder
        self.placed: dict[str, list[DeviceTables]] = {}

    def load(self, ref):
        shard = self.ranks[0].ranks.shard
        packed = packed_adapter(self.objects[ref.digest], self.form, self.folder, shard)
        self.done.append(Loaded(ref.object_key, "host", packed))

    def place(self, ref, packed, slabs):
        tables = []
        for rank in self.ranks:
            shard = rank.ranks.shard
            own = packed_adapter(self.objects[ref.digest], self.form, self.folder, shard)
            own.copy_to(rank.slabs, slabs)
            tables.append(DeviceTables.of(own, self.form.layout, slabs, rank.slabs))
        self.placed[ref.object_key] = tables
        self.done.append(Loaded(ref.object_key, "device", tables[0]))


def build_ranked_core(
    model_dir,
    folder,
    objects,
    size,
    num_slabs=96,
    budget=64,
    num_swap_slots=0,
    num_seqs=8,
    make_kernels=recording,
) -> tuple[EngineCore, Followers]:
    """As tests.engine.real_core.build_core, over `size` ranks.

    make_kernels: of a device and its ThreadRanks.
    """
    config = DecoderConfig.parse(load_config(model_dir))
    form = make_form(config, size)
    ranks = [
        Rank(own, model_dir, num_slabs, num_swap_slots, make_kernels)
        for own in ThreadRanks.group(size)
    ]
    folder.mkdir()
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs}
    followers = Followers(ranks[1:], folder, **limits)
    loader = RankedLoader(ranks, form, objects, folder / "packed")
    adapters = AdapterManager(Arena(num_slabs), loader)
    ranks[0].build(folder, adapters.tables, **limits)
    limits |= {"max_model_len": 256, "sliding_window": config.sliding_window}
    costs = PreemptionCosts(copy_bytes_per_s=1e15)
    costs.note_prefill(1, 1.0)
    swap = SwapSpace(num_swap_slots, form.layout.slab_bytes, costs)
    scheduler = Scheduler(
        SchedulerConfig(**limits), form.layout, adapters, [b""] * config.vocab_size, [0], swap
    )
    journal = Journal(folder / "journal", "eng-1", "base-1")
    runner = RankedRunner(ranks[0], followers, loader)
    return EngineCore(scheduler, runner, journal), followers
