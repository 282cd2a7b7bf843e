"""An engine core around a real model, with adapters loaded without threads, for tests."""

import hashlib
import time
from dataclasses import replace

import torch

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.cpu.draft_model import CpuDraftModel, draft_layout
from engine.cpu.runner import ModelRunner
from engine.drafts.speculation import Speculation
from engine.journal.journal import Journal
from engine.kv.swap import PreemptionCosts, SwapSpace
from engine.models.config import DecoderConfig
from engine.models.rounding import NO_ROUNDING, WeightRounding
from engine.models.weights import ServedNumbers, load_config, open_weights
from engine.proofs.merged import MergedModel
from engine.scheduling.scheduler import Scheduler
from engine.steps.meter import TokenMeter
from engine.wire.messages import ProofResult, ProveAdapter
from kernels.cpu.plain import CpuKernels
from lora.arena import Arena
from lora.batch import DeviceTables
from lora.layout import Layout
from lora.loads import Placed, Read
from lora.manager import AdapterManager
from lora.packed import PackedForm
from lora.shard import Shard
from registry.base.base_model import BaseModel
from registry.ref import AdapterRef
from tests.cpu_decoder import make_decoder
from tests.engine.fake_draft_model import speculating
from tests.engine.fakes import FLAT, FakeGrammars, FakeLoader
from tests.engine.late_runner import LateRunner
from tests.engine.rank_team import RankTeam
from tests.tiny_models import canonical_bytes, packed_adapter

CPU = torch.device("cpu")


class MemoryLoader(FakeLoader):
    """Packs and places real adapters at once, from objects in memory.

    others: the other ranks, see lora.loader.ThreadLoader.
    """

    def __init__(self, form, slabs, objects, folder, others=None):
        super().__init__()
        self.form, self.slabs_memory, self.objects, self.folder = form, slabs, objects, folder
        self.others = others

    def load(self, ref):
        shard = Shard(0, self.form.layout.num_shards)
        packed = packed_adapter(self.objects[ref.digest], self.form, self.folder, shard)
        self.done.append(Read(ref.object_key, packed))

    def place(self, ref, packed, slabs):
        packed.copy_to(self.slabs_memory, slabs)
        tables = DeviceTables.of(packed, self.form.layout, slabs, self.slabs_memory)
        if self.others:
            number = self.others.begin_placing(packed.digest, slabs)
            assert self.others.end_placing(number) is None
            tables = replace(tables, number=number)
        self.done.append(Placed(ref.object_key, tables))


def build_core(
    model_dir,
    directory,
    objects,
    num_slabs=96,
    budget=64,
    num_swap_slots=0,
    num_seqs=8,
    lag=0,
    make_backend=None,
    make_kernels=CpuKernels,
    num_ranks=1,
    make_team=RankTeam,
    tokens=None,
    quantization=None,
    drafter=None,
    draft_model_dir=None,
):
    """A core with a model on the CPU.

    num_swap_slots: preempted KV always goes there if it fits.
    make_kernels: makes kernels for an AttentionShape.
    make_backend: a function such as tests.engine.gpu.backends.fake_backend, to run on a device.
    num_ranks: ranks that share the model, as threads.   make_team: makes them, see RankTeam.
    tokens: their bytes, those that end an answer, and grammars; fakes by default.
    quantization: see EngineConfig; for a model on one CPU.
    drafter: makes drafts for every step that has room for them.
    draft_model_dir: the model that drafts where the drafter does not, or where there is none.
    """
    config = DecoderConfig.parse(load_config(model_dir))
    vocab_size = 0 if make_backend else config.vocab_size
    layout = Layout.of(config.shape, itemsize=4, num_shards=num_ranks, vocab_size=vocab_size)
    slabs = torch.zeros(num_slabs, layout.slab_bytes, dtype=torch.uint8)
    form = PackedForm(layout, "float32", "base-1")
    weights = dict(open_weights(model_dir, torch.float32))
    if make_backend:
        backend = make_backend(
            config,
            form,
            weights,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            arena_bytes=num_slabs * layout.slab_bytes,
        )
        slabs = backend.slabs
    directory.mkdir(exist_ok=True)
    team = None
    if num_ranks > 1:
        packed = directory / "packed"
        team = make_team(config, model_dir, form, num_slabs, num_swap_slots, make_kernels, packed)
        slabs = team.arenas[0]
    loader = MemoryLoader(form, slabs, objects, directory / "packed", team)
    adapters = AdapterManager(Arena(num_slabs), loader)
    limits = SchedulerConfig(
        max_model_len=256,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        sliding_window=config.sliding_window,
    )
    costs = PreemptionCosts(copy_bytes_per_s=1e15)
    costs.note_prefill(1, 1.0)
    swap = SwapSpace(num_swap_slots, layout.slab_bytes, costs)
    fakes = [b""] * config.vocab_size, [0], FakeGrammars(config.vocab_size)
    words, eos, grammars = tokens or fakes
    device = {"lag": 1, "most_choices": backend.most_choices} if make_backend else {}
    speculation = Speculation(FLAT, drafter, **device) if drafter else None
    if draft_model_dir:
        model = open_draft_model(draft_model_dir, slabs, make_kernels, quantization)
        speculate = speculating(model, drafter=drafter, idle_share=0.4)
        speculation = speculate(adapters.arena, limits.max_model_len)
    scheduler = Scheduler(
        limits, layout, adapters, words, eos, swap, grammars=grammars, speculation=speculation
    )
    meter = TokenMeter(directory / "meter")
    journal = Journal(directory / "journal", "eng-1", "base-1")
    numbers = ServedNumbers(model_dir, WeightRounding.of(quantization))
    whole = ServedNumbers(model_dir, NO_ROUNDING) if quantization else None
    reference = MergedModel(numbers, config, whole, backend.device if make_backend else None)
    if make_backend:
        runner = backend.make_runner(adapters.tables, meter, num_swap_slots)
    elif team:
        runner = team.lead(adapters.tables, meter)
    else:
        model = make_decoder(config, weights, form, 256, make_kernels, quantization=quantization)
        late = LateRunner(adapters) if lag else None
        tables = (late or adapters).tables
        runner = ModelRunner(model, slabs, form, tables, meter, num_swap_slots)
        if late:
            late.runner, runner = runner, late
    precision = 0.05 if quantization else 0.005
    return EngineCore(scheduler, runner, journal, reference, precision)


def open_draft_model(model_dir, slabs, make_kernels, quantization):
    """The draft model in this folder, with its KV in these slabs."""
    config = DecoderConfig.parse(load_config(model_dir))
    form = PackedForm(draft_layout(config.shape, 4, slabs.shape[1]), "float32", "base-1")
    weights = dict(open_weights(model_dir, torch.float32))
    model = make_decoder(config, weights, form, 256, make_kernels, quantization=quantization)
    return CpuDraftModel(model, slabs, form, most_tokens=64, max_model_len=256)


def prove(core, ref, object_path):
    """The proof of an adapter against the object in a file."""
    core.handle("gw", ProveAdapter(proof_id="p", adapter=ref, object_path=str(object_path)))
    while True:
        for _, answer in core.step():
            assert isinstance(answer, ProofResult)
            return answer.proof
        time.sleep(0)  # merged weights may run on a thread beside the steps


def add_adapter(objects, model_dir, adapter_dir, tmp_path):
    base = BaseModel.load(model_dir, "tiny", tmp_path / "cache")
    data = canonical_bytes(adapter_dir, base)
    digest = hashlib.sha256(data).hexdigest()
    objects[digest] = data
    return AdapterRef(adapter_dir.name, 1, digest, f"k/{digest}", 8, len(data))
