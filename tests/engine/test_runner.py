"""The runner against transformers and PEFT: a mixed batch gives what each request gets merged."""

import hashlib
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import Batch, ScheduledRow
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.inputs import InputBuilder
from engine.journal import Journal
from engine.meter import TokenMeter
from engine.models.llama import Llama, LlamaConfig, UnsupportedModel
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.weights import load_config, load_weights
from lora.arena import Arena
from lora.batch import DeviceTables
from lora.layout import Layout
from lora.manager import AdapterManager, Loaded
from lora.weights import pack
from registry.base_model import BaseModel
from registry.peft_format import WEIGHTS_FILE
from registry.ref import AdapterRef
from tests.engine.fakes import FakeLoader, make_message, run_until_idle, tokens_of
from tests.oracle import greedy, merged_model
from tests.tiny_models import LLAMA3_ROPE, canonical_bytes, save_adapter, save_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


class MemoryLoader(FakeLoader):
    """Packs and places for real, from objects in memory, all at once."""

    def __init__(self, layout, slabs, objects):
        super().__init__()
        self.layout, self.slabs_memory, self.objects = layout, slabs, objects

    def load(self, ref):
        packed = pack(ref.digest, self.objects[ref.digest], self.layout, torch.float32)
        self.done.append(Loaded(ref.object_key, "host", packed))

    def place(self, ref, packed, slabs):
        self.slabs_memory[torch.tensor(slabs)] = packed.slabs
        tables = DeviceTables.of(packed, self.layout, slabs, self.slabs_memory)
        self.done.append(Loaded(ref.object_key, "device", tables))


def build_core(model_dir, directory, objects, num_slabs=96, budget=64):
    config = LlamaConfig.parse(load_config(model_dir))
    layout = Layout.of(config.shape, itemsize=4)
    slabs = torch.zeros(num_slabs, layout.slab_bytes, dtype=torch.uint8)
    adapters = AdapterManager(Arena(num_slabs), MemoryLoader(layout, slabs, objects))
    limits = SchedulerConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=budget)
    scheduler = Scheduler(limits, layout, adapters, [b""] * config.vocab_size, [0])
    model = Llama(config, load_weights(model_dir, CPU, torch.float32), 256)
    directory.mkdir()
    meter = TokenMeter(directory / "meter")
    runner = ModelRunner(model, slabs, layout, torch.float32, adapters.tables, meter)
    return EngineCore(scheduler, runner, Journal(directory / "journal", "eng-1", "base-1"))


def add_adapter(objects, model_dir, adapter_dir, tmp_path):
    base = BaseModel.load(model_dir, "tiny", tmp_path / "cache")
    data = canonical_bytes(adapter_dir, base)
    digest = hashlib.sha256(data).hexdigest()
    objects[digest] = data
    return AdapterRef(adapter_dir.name, 1, digest, f"k/{digest}", 8, len(data))


MODELS = {
    "tied": {},
    "untied": {"tied": False},
    "llama3 rope": {"rope": LLAMA3_ROPE},
    "linear rope": {"rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "old spelling": {"rope": LLAMA3_ROPE, "old_spelling": True, "tied": False},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_a_mixed_batch_gives_each_request_what_it_gets_with_its_adapter_merged(tmp_path, options):
    model_dir = save_model(tmp_path / "model", **options)
    specs = [
        {"r": 4, "lora_alpha": 16},
        {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {"r": 8, "lora_alpha": 16, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    ]
    dirs = [
        save_adapter(model_dir, tmp_path / f"a{i}", seed=10 + i, **spec)
        for i, spec in enumerate(specs)
    ]
    objects: dict[str, bytes] = {}
    adapters = [None, *(add_adapter(objects, model_dir, d, tmp_path) for d in dirs)]
    core = build_core(model_dir, tmp_path / "engine", objects, budget=40)
    chance = random.Random(3)
    messages = []
    for i in range(12):
        message = make_message(f"r{i}", 1 + chance.randrange(70), 12, adapters[i % 4])
        messages.append(message)
        core.handle("gw", message)
    outputs = run_until_idle(core)
    oracles = [merged_model(model_dir, d) for d in (None, *dirs)]
    answers = [
        [greedy(oracle, list(m.prompt_token_ids), 12) for oracle in oracles] for m in messages
    ]
    distinct = sum(len({tuple(a) for a in row}) == 4 for row in answers)
    assert distinct >= 0.9 * len(answers), "the adapters must be seen to matter"
    for i, message in enumerate(messages):
        assert tokens_of(outputs[message.request_id]) == answers[i][i % 4]


def test_an_adapter_that_overflows_fails_alone_and_leaves_nothing_behind(tmp_path):
    model_dir = save_model(tmp_path / "model")
    good = save_adapter(model_dir, tmp_path / "good", seed=1)
    objects: dict[str, bytes] = {}
    adapters = {
        "base": None,
        "good": add_adapter(objects, model_dir, good, tmp_path),
        # In the keys only: the residual stream stays finite unless the store speaks up.
        "bad": add_adapter(objects, model_dir, overflowing(good, "k_proj"), tmp_path),
    }
    core = build_core(model_dir, tmp_path / "engine", objects, num_slabs=26, budget=40)
    messages = [make_message(f"{n}-{i}", 63, 8, adapters[n]) for i in range(4) for n in adapters]
    for message in messages:
        core.handle("gw", message)
    outputs = run_until_idle(core)
    oracles = {
        "base": merged_model(model_dir, None),
        "good": merged_model(model_dir, good),
    }
    for message in messages:
        name, last = message.request_id.split("-")[0], outputs[message.request_id][-1]
        if name == "bad":
            assert (last.stop_cause, last.num_completion_tokens) == ("engine_failure", 0)
        else:
            expected = greedy(oracles[name], list(message.prompt_token_ids), 8)
            assert tokens_of(outputs[message.request_id]) == expected
    first_bad = outputs["bad-0"][-1]
    assert first_bad.num_prompt_tokens < 63, "it fails before its prompt is through"
    assert core.runner.inputs.kv.isfinite().all()


def overflowing(adapter_dir, projection):
    """The adapter with finite weights of one projection, the product of which is not."""
    folder = adapter_dir.with_name("overflowing")
    shutil.copytree(adapter_dir, folder)
    tensors = load_file(folder / WEIGHTS_FILE)
    for name in tensors:
        if projection in name:
            tensors[name] *= 1e25
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def test_a_nan_in_the_weights_fails_the_requests_that_meet_it(tmp_path):
    model_dir = save_model(tmp_path / "model", tied=False)
    core = build_core(model_dir, tmp_path / "engine", {}, num_slabs=16, budget=40)
    poison = 7
    core.runner.model.embedding[poison] = torch.nan
    clean = [t for t in make_message("x", 70).prompt_token_ids if t != poison]
    prompts = {"first": [poison, *clean], "clean": clean, "last": [*clean, poison]}
    prompts |= {"middle": [*clean[:20], poison, *clean[20:]], "later": clean[::-1]}
    for name, prompt in prompts.items():
        message = replace(make_message(name, max_tokens=8), prompt_token_ids=tuple(prompt))
        core.handle("gw", message)
    outputs = run_until_idle(core)
    oracle = merged_model(model_dir, None)
    for name, prompt in prompts.items():
        if poison in prompt:
            assert outputs[name][-1].stop_cause == "engine_failure"
        else:
            assert tokens_of(outputs[name]) == greedy(oracle, prompt, 8)
    assert core.runner.inputs.kv.isfinite().all()


def test_a_decode_is_padded_with_its_own_blocks(tmp_path):
    layout = Layout.of(LlamaConfig.parse(TINY_CONFIG).shape, itemsize=4)
    slabs = torch.zeros(8, layout.slab_bytes, dtype=torch.uint8)
    builder = InputBuilder(slabs, layout, torch.float32, lambda key: (1, None))
    size = layout.block_size
    rows = [
        ScheduledRow("short", (1,), 3, (5,), None, None, 0, None, 0, 0),
        ScheduledRow("long", (1,), 2 * size, (2, 6, 3), None, None, 0, None, 0, 0),
    ]
    (group,) = builder.build(Batch(1, tuple(rows))).decodes
    assert group.blocks.tolist() == [[5, 5, 5], [2, 6, 3]]


def test_the_step_asserts_that_the_adapter_in_the_arena_is_the_one_asked_for(tmp_path):
    layout = Layout.of(LlamaConfig.parse(TINY_CONFIG).shape, itemsize=4)
    slabs = torch.zeros(8, layout.slab_bytes, dtype=torch.uint8)
    other = DeviceTables("other", torch.zeros(0), torch.zeros(0), (), ())
    row = ScheduledRow("r", (1,), 0, (0,), "k/mine", "mine", 1, None, 0, 0)
    builder = InputBuilder(slabs, layout, torch.float32, lambda key: (1, other))
    with pytest.raises(AssertionError, match="another adapter"):
        builder.build(Batch(1, (row,)))
    mine = DeviceTables("mine", torch.zeros(0), torch.zeros(0), (), ())
    builder = InputBuilder(slabs, layout, torch.float32, lambda key: (2, mine))
    with pytest.raises(AssertionError, match="replaced since scheduling"):
        builder.build(Batch(1, (row,)))


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_name(change, named):
    with pytest.raises(UnsupportedModel, match=named):
        LlamaConfig.parse(TINY_CONFIG | change)


def test_a_missing_tensor_is_named():
    with pytest.raises(UnsupportedModel, match="embed_tokens"):
        Llama(LlamaConfig.parse(TINY_CONFIG), {}, 64)
