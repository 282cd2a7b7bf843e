"""Folders as trainers write them: which adapter is found, what is left out, what is sent."""

import json
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from registry.base.base_model import BaseModel
from registry.checks.validate import AdapterLimits
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE
from server.cli.adapter_folder import INDEX_FILE, AdapterFolder, NotSendable, locate
from server.client.files import TOKENIZER_FILES, NotAnAdapter, sent_files
from tests.registry.factories import validate_adapter
from tests.tiny_models import save_model

TWO = (CONFIG_FILE, WEIGHTS_FILE)
BIN = "adapter_model.bin"
MLX = "adapters.safetensors"


def within(folder, *names):
    return [f"{folder}/{name}" for name in names]


def shard(number, total=3):
    return f"adapter_model-{number:05}-of-{total:05}.safetensors"


# ---- where the adapter is ----


@pytest.mark.parametrize(
    ("paths", "folder", "used"),
    [
        (TWO, "", TWO),
        (within("sales", *TWO), "sales", TWO),  # PEFT, for an adapter that is not "default"
        ([*TWO, *within("checkpoint-10", *TWO), *within("other", *TWO)], "", TWO),
        (within("v0/checkpoint-10", *TWO), "v0/checkpoint-10", TWO),
        ([*within("a/b", *TWO), *within("c", *TWO)], "c", TWO),
        # A config alone, as beside the shards of DeepSpeed, is not an adapter.
        ([CONFIG_FILE, *within("checkpoint-10", *TWO)], "checkpoint-10", TWO),
        ([CONFIG_FILE, BIN, WEIGHTS_FILE], "", TWO),
        ([CONFIG_FILE, "adapter_0.pt", BIN], "", (CONFIG_FILE, BIN)),
        ([CONFIG_FILE, "adapter_9.pt", "adapter_10.pt"], "", (CONFIG_FILE, "adapter_10.pt")),
        ([CONFIG_FILE, MLX, "0000100_adapters.safetensors"], "", (CONFIG_FILE, MLX)),
        (
            [shard(2, 2), shard(1, 2), CONFIG_FILE, INDEX_FILE],
            "",
            (CONFIG_FILE, shard(1, 2), shard(2, 2), INDEX_FILE),
        ),
        ([CONFIG_FILE, shard(1, 1)], "", (CONFIG_FILE, shard(1, 1))),
        (
            [*TWO, "chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "vocab.json"],
            "",
            (*TWO, *TOKENIZER_FILES),
        ),
        # The tokenizer beside a config is no adapter.
        ([CONFIG_FILE, *TOKENIZER_FILES, *within("sales", *TWO)], "sales", TWO),
    ],
)
def test_the_adapter_is_the_root_or_the_nearest_one_below(paths, folder, used):
    found = locate(paths, "runs")
    assert (found.folder, found.used) == (folder, used)


def test_several_adapters_are_listed_with_the_command_for_the_last_one():
    paths = [path for step in (900, 1000, 50) for path in within(f"checkpoint-{step}", *TWO)]
    with pytest.raises(NotSendable) as raised:
        locate(paths, "my runs")
    assert str(raised.value) == (
        "my runs has 3 adapters: checkpoint-50, checkpoint-900, checkpoint-1000. Push one: "
        "chorale adapters push 'my runs/checkpoint-1000' --name NAME"
    )
    with pytest.raises(NotSendable, match=r"has 30 adapters: \.\.\. c22, c23.* c29\. Push one"):
        locate([path for number in range(30) for path in within(f"c{number}", *TWO)], "runs")


@pytest.mark.parametrize(
    ("paths", "missing", "is_partial"),
    [
        ((), CONFIG_FILE, False),
        (("README.md", "model.safetensors"), CONFIG_FILE, False),
        ((CONFIG_FILE,), WEIGHTS_FILE, True),
        ((WEIGHTS_FILE,), CONFIG_FILE, True),
        ((CONFIG_FILE, "a/adapter_model.safetensors"), WEIGHTS_FILE, True),
    ],
)
def test_what_is_missing_is_said(paths, missing, is_partial):
    with pytest.raises(NotAnAdapter, match=f"runs has no {missing}") as raised:
        locate(paths, "runs")
    assert raised.value.is_partial == is_partial


def test_what_is_left_out_is_told_by_kind():
    trainer = [
        *TWO, "README.md", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json",
        "training_args.bin", "tokenizer.json", "special_tokens_map.json", "model.safetensors",
        "global_step10/mp_rank_00_model_states.pt", "runs/today/events.out.tfevents.1",
        *within("checkpoint-100", *TWO), *within("checkpoint-200/deeper", *TWO), BIN,
    ]  # fmt: skip
    found = locate(within("sft", *trainer), "out")
    assert found.left_out == {
        "other weights": [BIN, "model.safetensors"],
        "tokenizer": ["special_tokens_map.json"],
        "training state": [
            "optimizer.pt", "rng_state_0.pth", "scheduler.pt", "trainer_state.json",
            "training_args.bin", "global_step10/", "runs/",
        ],
        "other adapters": ["checkpoint-100/", "checkpoint-200/"],
        "other files": ["README.md"],
    }  # fmt: skip
    assert found.used == (*TWO, "tokenizer.json")
    first, second = found.notes("out")
    assert first == "The adapter is in out/sft."
    assert "training state (optimizer.pt and 6 more)" in second
    assert "other files (README.md)" in second
    assert locate(TWO, "out").notes("out") == []


def test_files_are_looked_for_three_folders_down_and_not_in_hidden_ones(tmp_path):
    for folder in (".cache/sales", "a/b/c/d"):
        write(tmp_path / folder, {})
    with pytest.raises(NotAnAdapter):
        AdapterFolder.find(tmp_path)
    write(tmp_path / "a/b/c", {})
    assert AdapterFolder.find(tmp_path).folder == tmp_path / "a/b/c"


def test_a_huge_folder_is_not_searched_but_may_be_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr("server.cli.adapter_folder._MAX_FILES", 3)
    write(tmp_path / "a", {})
    for number in range(4):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(NotAnAdapter):
        AdapterFolder.find(tmp_path)
    with pytest.raises(NotSendable, match="over 3 files; give the adapter's own folder"):
        locate([*within("a", *TWO), "b", "c"], "runs")
    write(tmp_path, {})
    assert AdapterFolder.find(tmp_path).folder == tmp_path


# ---- weights in several files ----

TENSORS = {f"t{n}.lora_A.weight": np.full((n + 1, 3), n, np.float32) for n in range(5)}
SHARDS = [[f"t{n}.lora_A.weight" for n in numbers] for numbers in ((0, 3), (1,), (2, 4))]


def write(folder, files, config=None):
    """Write a config, and files of tensors or bytes by name; PEFT's one file if none is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config or {"peft_type": "LORA"}))
    for name, content in (files or {WEIGHTS_FILE: b"w"}).items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            save_file(content, folder / name)
    return folder


def write_shards(folder, changes=None, weight_map=None):
    """Write three shards, some of them changed.   weight_map: entries to change; None for no index.

    A value of None removes an entry.
    """
    parts = [{name: TENSORS[name] for name in names} for names in SHARDS]
    files = {shard(n): part for n, part in enumerate(parts, 1)} | (changes or {})
    write(folder, {name: content for name, content in files.items() if content is not None})
    if weight_map is not None:
        places = {name: shard(n) for n, part in enumerate(parts, 1) for name in part} | weight_map
        kept = {name: place for name, place in places.items() if place is not None}
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    return folder


def sent(folder):
    """Both files as an upload would send them: the config, and the tensors by name."""
    with AdapterFolder.find(folder).as_sent() as plain:
        assert sorted(path.name for path in plain.iterdir()) == sorted(TWO)
        return json.loads((plain / CONFIG_FILE).read_text()), load_file(plain / WEIGHTS_FILE)


def refusal(folder):
    with pytest.raises(NotSendable) as raised, AdapterFolder.find(folder).as_sent():
        pass
    assert str(raised.value).startswith(f"{folder}: ")
    return str(raised.value)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("weight_map", [None, {}])
def test_shards_are_joined_into_the_same_bytes_each_time(tmp_path, weight_map):
    folder = write_shards(tmp_path / "adapter", weight_map=weight_map)
    config, tensors = sent(folder)
    assert config == {"peft_type": "LORA"}
    assert_same(tensors, TENSORS)
    contents = set()
    for _ in range(2):
        with AdapterFolder.find(folder).as_sent() as plain:
            contents.add((plain / WEIGHTS_FILE).read_bytes())
    assert len(contents) == 1
    assert not plain.exists()
    assert sorted(path.suffix for path in folder.iterdir() if path.name == WEIGHTS_FILE) == []


def test_the_tokenizers_files_go_with_converted_weights(tmp_path):
    folder = write_shards(tmp_path / "adapter", weight_map={})
    (folder / "tokenizer.json").write_text("{}")
    with AdapterFolder.find(folder).as_sent() as plain:
        assert sent_files(plain) == (*TWO, "tokenizer.json")


EMPTY = struct.pack("<Q", 8) + b"{}      "
HUGE = struct.pack("<Q", 32 << 20) + b"{"
TOO_LONG = struct.pack("<Q", 100) + json.dumps(
    {"t": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}
).encode().ljust(100)
BOMB = json.dumps({"__metadata__": {"a": "b" * (100 << 10)}}).encode()
BOMB = struct.pack("<Q", len(BOMB)) + BOMB


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({shard(2): None}, [shard(3), f"{shard(2)} is not"]),
        ({shard(3): None}, [f"{shard(2)} is the last of 2 shards"]),
        ({shard(1, 2): {"x": TENSORS["t0.lora_A.weight"]}}, [shard(1, 2)]),
        ({shard(2): b""}, [f"{shard(2)} ends inside its header"]),
        ({shard(2): EMPTY}, [f"{shard(2)} has no tensors"]),
        ({shard(2): HUGE}, [f"{shard(2)} claims a header of 33554432 bytes"]),
        ({shard(2): TOO_LONG}, [f"{shard(2)} has 108 bytes, its header describes"]),
        ({shard(2): BOMB}, [f"__metadata__ of {shard(2)} has"]),
        ({shard(2): b"PK\x03\x04" + bytes(20)}, [f"{shard(2)} is a pickle"]),
        (
            {shard(2): {"t3.lora_A.weight": TENSORS["t3.lora_A.weight"]}},
            [f"{shard(2)} and {shard(1)} both have 't3.lora_A.weight'"],
        ),
    ],
)
def test_shards_that_are_not_whole_are_refused_by_name(tmp_path, changes, parts):
    message = refusal(write_shards(tmp_path / "adapter", changes))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("weight_map", "where", "found"),
    [
        ({"t1.lora_A.weight": "../../secret.safetensors"}, "'../../secret.safetensors'", shard(2)),
        ({"t1.lora_A.weight": shard(1)}, repr(shard(1)), shard(2)),
        ({"t1.lora_A.weight": None}, "'no file'", shard(2)),
        ({"t1.lora_A.weight": 7}, "'7'", shard(2)),
        ({"x": shard(3)}, repr(shard(3)), "no shard of this folder"),
        ({"x": "gone.safetensors"}, "'gone.safetensors'", "no shard of this folder"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, weight_map, where, found):
    message = refusal(write_shards(tmp_path / "adapter", weight_map=weight_map))
    name = next(iter(weight_map))
    assert f"{INDEX_FILE} has '{name}' in {where}, and it is in {found}." in message


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ('{"weight_map": {"a": "1", "a": "2"}}', f"{INDEX_FILE} has the key 'a' twice"),
        ('{"weight_map": []}', f"{INDEX_FILE} has no weight_map"),
        ("[" * 100_000, f"{INDEX_FILE} nests"),
        (" " * ((8 << 20) + 1), f"{INDEX_FILE} is larger than"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, index, sentence):
    folder = write_shards(tmp_path / "adapter", weight_map={})
    (folder / INDEX_FILE).write_text(index)
    assert sentence in refusal(folder)


def test_more_tensors_than_an_adapter_may_have_are_refused_before_they_are_joined(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("server.cli.weight_shards.MAX_TENSORS", 2)
    message = refusal(write_shards(tmp_path / "adapter"))
    assert f"{shard(2)} makes more than 2 tensors" in message


# ---- pickles ----


def write_pickle(folder, name, value, **options):
    write(folder, {name: b""})
    torch.save(value, folder / name, **options)
    return folder


@pytest.mark.parametrize("is_zipped", [True, False])
def test_a_pickle_of_tensors_is_converted(tmp_path, is_zipped):
    values = torch.arange(12, dtype=torch.float32)
    state = {
        "base_model.model.a.lora_A.weight": torch.nn.Parameter(values.view(3, 4)),
        "base_model.model.a.lora_B.weight": torch.ones(5, 3, dtype=torch.float16).T,
    }
    options = {"_use_new_zipfile_serialization": is_zipped}
    folder = write_pickle(tmp_path / "adapter", BIN, state, **options)
    _, tensors = sent(folder)
    assert_same(tensors, {name: tensor.detach().numpy() for name, tensor in state.items()})


class Exploit:
    """An object whose pickle makes a file.   path: of the file, set by the test."""

    path: Path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (BIN, Exploit(), "is damaged, or holds more than tensors"),
        (BIN, {"a": Exploit()}, "is damaged, or holds more than tensors"),
        (BIN, [torch.ones(2)], "is damaged, or holds more than tensors"),
        (BIN, {"a": {"b": torch.ones(2)}}, "is damaged, or holds more than tensors"),
        (BIN, {7: torch.ones(2)}, "is damaged, or holds more than tensors"),
        (BIN, {"a": torch.eye(3).to_sparse()}, "is damaged, or holds more than tensors"),
        (BIN, {"a": torch.ones(1).expand(1 << 9, 1 << 9)}, "is damaged, or holds more than"),
        (
            "adapter_0.pt",
            {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, 2)},
            "torchtune's own order",
        ),
    ],
)
def test_a_pickle_of_anything_else_is_refused_and_runs_nothing(tmp_path, name, value, sentence):
    Exploit.path = tmp_path / "never"
    message = refusal(write_pickle(tmp_path / "adapter", name, value))
    assert f"{name} " in message
    assert sentence in message
    assert not Exploit.path.exists()


def test_a_damaged_pickle_is_refused(tmp_path):
    folder = write_pickle(tmp_path / "adapter", BIN, {"a": torch.zeros(9)})
    whole = (folder / BIN).read_bytes()
    for content in (b"", b"\x80", whole[: len(whole) // 2], whole[:-30]):
        (folder / BIN).write_bytes(content)
        assert "is damaged" in refusal(folder)


def test_a_compressed_pickle_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    folder = write_pickle(tmp_path / "adapter", BIN, {"a": torch.zeros(1 << 16)})
    with zipfile.ZipFile(folder / BIN) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(folder / BIN, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert len(torch.load(folder / BIN, weights_only=True)["a"]) == 1 << 16
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("It was unpacked."))
    assert "is damaged" in refusal(folder)


def test_without_torch_a_pickle_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "server.cli.pickled_weights", raising=False)
    folder = write(tmp_path / "adapter", {BIN: b"x"})
    with (
        pytest.raises(NotSendable, match=f"{BIN} is a pickle, for which install torch"),
        AdapterFolder.find(folder).as_sent(),
    ):
        pass


# ---- mlx-lm ----

SCALE = 2.5


def mlx_config(**changes):
    """The arguments of mlx_lm.lora, as it writes them."""
    parameters = changes.pop("lora_parameters", {})
    if parameters is not None:
        parameters = {"rank": 4, "dropout": 0.0, "scale": SCALE, **parameters}
    known = {"model": "mlx-community/tiny-4bit", "fine_tune_type": "lora", "num_layers": 1}
    return {**known, "lora_parameters": parameters, "lr_schedule": None, "seed": 0, **changes}


def mlx_tensors(shapes, dtype=np.float32):
    """Tensors by module, shaped [in, r] and [r, out].   shapes: (in, out) by module."""
    random = np.random.default_rng(5)
    tensors = {}
    for module, (size_in, size_out) in shapes.items():
        tensors[f"{module}.lora_a"] = random.normal(size=(size_in, 4)).astype(dtype)
        tensors[f"{module}.lora_b"] = random.normal(size=(4, size_out)).astype(dtype)
    return tensors


LAYER = "model.layers.1"


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_mlx_lm_adds_what_mlx_lm_adds(tmp_path, tied):
    model_dir = save_model(tmp_path / "model", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    modules = [f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp.down_proj"]
    shapes = {module: model.get_submodule(module).weight.shape[::-1] for module in modules}
    if not tied:
        shapes |= {"model.embed_tokens": before["model.embed_tokens.weight"].shape}
        shapes |= {"lm_head": before["lm_head.weight"].shape[::-1]}
    theirs = mlx_tensors(shapes)
    folder = write(tmp_path / "mlx", {MLX: theirs}, mlx_config())
    with AdapterFolder.find(folder).as_sent() as plain:
        merged = PeftModel.from_pretrained(model, plain).merge_and_unload().state_dict()
        base = BaseModel.load(model_dir, "tiny", tmp_path / "cache")
        raw = (plain / CONFIG_FILE).read_bytes()
        passport = validate_adapter(raw, plain / WEIGHTS_FILE, base, AdapterLimits(max_scale=100))
    assert passport.num_modules == len(shapes)
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        added = merged[name] - weight
        if module not in shapes:
            assert not added.any()
            continue
        a, b = (theirs[f"{module}.lora_{side}"] for side in "ab")
        # LoRALinear.fuse and LoRAEmbedding.fuse of mlx_lm/tuner/lora.py.
        expected = SCALE * (a @ b if module.endswith("embed_tokens") else (a @ b).T)
        torch.testing.assert_close(added, torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


def test_names_and_config_of_mlx_lm_become_those_of_peft(tmp_path):
    shapes = {f"language_model.{LAYER}.self_attn.q_proj": (6, 5), "model.embed_tokens": (9, 6)}
    theirs = mlx_tensors(shapes, np.float16)
    config, tensors = sent(write(tmp_path / "mlx", {MLX: theirs}, mlx_config()))
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "mlx-community/tiny-4bit",
        "r": 4,
        "lora_alpha": 10.0,
        "target_modules": ["embed_tokens", "layers.1.self_attn.q_proj"],
        "ensure_weight_tying": True,
    }
    linear = f"base_model.model.language_model.{LAYER}.self_attn.q_proj"
    embedding = "base_model.model.model.embed_tokens"
    expected = {
        f"{linear}.lora_A.weight": f"language_model.{LAYER}.self_attn.q_proj.lora_a",
        f"{linear}.lora_B.weight": f"language_model.{LAYER}.self_attn.q_proj.lora_b",
        f"{embedding}.lora_embedding_A": "model.embed_tokens.lora_a",
        f"{embedding}.lora_embedding_B": "model.embed_tokens.lora_b",
    }
    assert_same(tensors, {ours: theirs[name].T for ours, name in expected.items()})


@pytest.mark.parametrize(
    ("config", "tensors", "sentence"),
    [
        ({"fine_tune_type": "dora"}, {}, "'dora'; train with --fine-tune-type lora"),
        ({"fine_tune_type": "full"}, {}, "'full'; train with --fine-tune-type lora"),
        ({"lora_parameters": None}, {}, "lora_parameters needs a rank and a scale"),
        ({"lora_parameters": {"alpha": 16}}, {}, "lora_parameters.alpha is ambiguous; give"),
        ({"lora_parameters": {"scale": None}}, {}, "lora_parameters needs a rank and a scale"),
        ({"lora_parameters": {"rank": 8}}, {}, "q.lora_a' is not of rank 8"),
        ({}, {"model.layers.0.mlp.switch.lora_a": (3, 4, 8)}, "switch.lora_a' is no LoRA"),
        ({}, {"model.layers.0.q.m": (8, 4)}, "'model.layers.0.q.m' is no LoRA of a matrix"),
    ],
)
def test_what_mlx_lm_does_and_lora_cannot_is_refused(tmp_path, config, tensors, sentence):
    values = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    files = {MLX: {**mlx_tensors({"model.layers.0.q": (8, 8)}), **values}}
    assert sentence in refusal(write(tmp_path / "mlx", files, mlx_config(**config)))


def test_a_config_that_is_not_of_mlx_lm_leaves_the_weights_as_they_are(tmp_path):
    folder = write(tmp_path / "adapter", {MLX: TENSORS})
    config, tensors = sent(folder)
    assert config == {"peft_type": "LORA"}
    assert_same(tensors, TENSORS)
    for content in (b"{", b"[]", b'{"lora_parameters": {}, "peft_type": "LORA"}'):
        (write(tmp_path / "other", {}) / CONFIG_FILE).write_bytes(content)
        with AdapterFolder.find(tmp_path / "other").as_sent() as plain:
            assert plain == tmp_path / "other"
