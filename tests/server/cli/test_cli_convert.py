"""Adapters of every type that PEFT merges, made by PEFT and converted by the command."""

import functools
import json
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora import config as options
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from registry.base.base_model import BaseModel
from registry.checks.validate import AdapterLimits
from registry.formats import peft_config
from registry.formats.architecture import text_name
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE, lora_names
from server.cli.main import app
from tests.oracle import merged_model
from tests.registry.factories import validate_adapter
from tests.server.fake_api import is_one_line
from tests.tiny_models import (
    MIXTRAL,
    MROPE,
    NEWER_NAMES,
    QWEN3_MOE,
    load_model,
    rename_tensors,
    save_model,
)

TARGETS = ["q_proj", "v_proj", "down_proj"]
TYPES = {
    "AdaLora": {"init_r": 4, "total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "Delora": {"r": 3},
    "FourierFT": {"n_frequency": 20},
    "HRA": {"r": 2},
    "Hira": {"r": 3},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LoHa": {"r": 2},
    "LoKr": {"r": 2},
    "Miss": {"r": 2},
    "OFT": {"oft_block_size": 4},
    "RandLora": {"r": 4},
    "Road": {"group_size": 16},
    "Shira": {"r": 2},
    "VBLoRA": {"r": 4, "num_vectors": 8, "vector_length": 16, "topk": 2},
    "Vera": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
    "WaveFT": {"n_frequency": 20},
}
OPTIONS = {
    "use_dora": True,
    "use_qalora": True,
    "kasa_config": options.KasaConfig(),
}
OFTEN = ("AdaLora", "IA3", "LoHa", "OFT", "use_dora")
"""Cases of each run: the conversion does not ask for the type."""


def rarely(names):
    """The names as parameters, of which most are for `make soak`."""
    return [pytest.param(it, marks=[] if it in OFTEN else pytest.mark.soak) for it in names]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("convert") / "model", num_hidden_layers=1)


@pytest.fixture(scope="module")
def base(model_dir):
    return BaseModel.load(model_dir, "tiny", model_dir.parent / "cache")


def fresh_model(model_dir):
    return load_model(model_dir)


def train(model):
    """Move every trained value a little."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)


def write(model_dir, folder, config):
    torch.manual_seed(2)
    model = peft.get_peft_model(fresh_model(model_dir), config)
    train(model)
    model.save_pretrained(folder)
    return folder


def make_config(name, **changes):
    values = {"task_type": "CAUSAL_LM", "target_modules": TARGETS, **changes}
    return getattr(peft, f"{name}Config")(**values)


def convert(model_dir, folder, *arguments):
    out = folder.with_name("out")
    command = ["adapters", "convert", str(folder), "--model", str(model_dir), "--out", str(out)]
    return CliRunner().invoke(app, [*command, *arguments]), out


def converted(model_dir, folder):
    """Convert almost exactly, to an adapter that the server accepts; return its folder."""
    result, out = convert(model_dir, folder, "--max-error", "1e-4")
    assert result.exit_code == 0, result.stderr
    base = BaseModel.load(model_dir, "tiny", out.with_name("cache"))
    validate_adapter((out / CONFIG_FILE).read_bytes(), out / WEIGHTS_FILE, base, AdapterLimits())
    return out


@functools.cache
def base_weights(model_dir):
    return fresh_model(model_dir).state_dict()


def effects(model_dir, model):
    """Differences of a model's weights from the base model's, by module."""
    before, after = base_weights(model_dir), model.state_dict()
    differences = {name: after[name] - before[name] for name in before}
    return {name.removesuffix(".weight"): each for name, each in differences.items() if each.any()}


def merged_effects(model_dir, folder):
    model = peft.PeftModel.from_pretrained(fresh_model(model_dir), folder)
    return effects(model_dir, model.base_model.merge_and_unload())


def relative(ours, theirs):
    return float(torch.linalg.norm(ours - theirs) / torch.linalg.norm(theirs))


def assert_converted(model_dir, base, folder, max_error):
    """Convert with the smallest rank; what the report says must be true. Returns the report."""
    result, out = convert(model_dir, folder, "--json", "--max-error", str(max_error))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    theirs = merged_effects(model_dir, folder)
    ours = effects(model_dir, merged_model(model_dir, out))
    assert ours.keys() == theirs.keys() == report["errors"].keys()
    errors = {name: relative(ours[name], theirs[name]) for name in theirs}
    assert report["errors"] == pytest.approx(errors, abs=1e-4)
    assert max(errors.values()) == pytest.approx(report["worst_error"], abs=1e-4)
    assert report["worst_error"] <= max_error
    lost = sum(float((ours[name] - theirs[name]).norm() ** 2) for name in theirs)
    whole = sum(float(each.norm() ** 2) for each in theirs.values())
    assert report["share_kept"] == pytest.approx(1 - lost / whole, abs=1e-6)
    passport = validate_adapter(
        (out / CONFIG_FILE).read_bytes(), out / WEIGHTS_FILE, base, AdapterLimits()
    )
    assert passport.rank == report["rank"]
    return report


@pytest.mark.parametrize("name", rarely(TYPES))
def test_every_type_becomes_a_lora_with_the_error_that_is_told(model_dir, base, tmp_path, name):
    folder = write(model_dir, tmp_path / "adapter", make_config(name, **TYPES[name]))
    assert_converted(model_dir, base, folder, max_error=0.3)


@pytest.mark.parametrize("option", rarely(OPTIONS))
def test_a_lora_of_another_formula_becomes_a_plain_one(model_dir, base, tmp_path, option):
    config = make_config("Lora", r=3, qalora_group_size=16, **{option: OPTIONS[option]})
    folder = write(model_dir, tmp_path / "adapter", config)
    assert_converted(model_dir, base, folder, max_error=0.2)


def assert_same_logits(model_dir, folder, out):
    """Compare what the adapter and the LoRA made of it do to the base model's logits."""
    prompt = torch.tensor([[5, 1, 290, 7, 3, 100, 0]])
    with torch.inference_mode():
        base = fresh_model(model_dir)(prompt).logits
        theirs, ours = (
            peft.PeftModel.from_pretrained(fresh_model(model_dir), each)(prompt).logits
            for each in (folder, out)
        )
    assert relative(ours - base, theirs - base) < 1e-3


TRAINED = {
    "tokens": make_config("Lora", r=3, trainable_token_indices=[1, 5, 290]),
    "a head beside LoRA": make_config("Lora", r=2, modules_to_save=["lm_head"]),
    "tokens of LoHa and a saved head": make_config("LoHa", r=2, modules_to_save=["lm_head"]),
    # The config alone is that of a LoRA that is served; its weights say that the head was trained.
    "a saved head": make_config("Lora", r=3, modules_to_save=["lm_head"]),
    "tokens alone": peft.TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=[7, 3]),
}


@pytest.mark.parametrize(
    ("case", "tied"),
    [
        ("tokens", True),
        ("a head beside LoRA", False),
        ("tokens of LoHa and a saved head", False),
        ("a saved head", False),
        ("tokens alone", True),
    ],
)
def test_trained_tokens_and_heads_become_lora_of_the_ends(tmp_path, case, tied):
    model_dir = save_model(tmp_path / "model", num_hidden_layers=1, tied=tied)
    folder = write(model_dir, tmp_path / "adapter", TRAINED[case])
    assert_same_logits(model_dir, folder, converted(model_dir, folder))


@pytest.mark.parametrize("form", ["shards", "pickle"])
def test_weights_in_another_form_in_a_subfolder_are_converted_too(model_dir, tmp_path, form):
    whole = write(model_dir, tmp_path / "whole", make_config("LoHa", r=2))
    folder = tmp_path / "run" / "checkpoint-5"
    shutil.copytree(whole, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tensors = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    if form == "pickle":
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        for number in (0, 1):
            part = dict(list(tensors.items())[number::2])
            save_file(part, folder / f"adapter_model-0000{number + 1}-of-00002.safetensors")
    out = converted(model_dir, folder.parent)
    assert_same_logits(model_dir, whole, out)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"


# ---- mixtures of experts, whose fused parameters are not what their files hold ----

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXTURES = {"qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture_dir(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return save_model(folder, family=request.param, tied=False, **MIXTURES[request.param])


def test_dora_on_a_mixtures_attention_becomes_a_plain_lora(mixture_dir, tmp_path):
    config = make_config("Lora", r=3, use_dora=True, target_modules=ATTENTION)
    folder = write(mixture_dir, tmp_path / "adapter", config)
    assert_same_logits(mixture_dir, folder, converted(mixture_dir, folder))


BESIDE_ATTENTION = {
    "experts": make_config("Lora", target_parameters=["experts.gate_up_proj"]),
    "router": make_config("LoHa", target_modules=ATTENTION, modules_to_save=["gate"]),
    "MLP beside experts": make_config("LoHa", target_modules=["down_proj"]),
}


@pytest.mark.parametrize("case", BESIDE_ATTENTION)
def test_what_changes_more_of_a_mixture_than_attention_is_refused(tmp_path, case):
    model_dir = save_model(tmp_path / "model", family="qwen3_moe", tied=False, **QWEN3_MOE)
    folder = write(model_dir, tmp_path / "adapter", BESIDE_ATTENTION[case])
    result, out = convert(model_dir, folder)
    assert result.exit_code == 1
    assert is_one_line(result.stderr, ".mlp.", "in a model without experts, MLP; train those only")
    assert not out.exists()


def test_what_a_refusal_says_is_convertible_is_converted_here():
    types = {make_config(name, **changes).peft_type.value for name, changes in TYPES.items()}
    assert types == peft_config.CONVERTIBLE_TYPES
    assert OPTIONS.keys() == peft_config.CONVERTIBLE_OPTIONS


def test_an_exact_effect_takes_only_the_rank_that_it_has(model_dir, base, tmp_path):
    folder = write(model_dir, tmp_path / "adapter", make_config("LoHa", r=2))
    report = assert_converted(model_dir, base, folder, max_error=1e-3)
    assert report["rank"] == 4  # the product of two products of rank 2
    assert report["share_kept"] == pytest.approx(1)


def test_a_larger_error_than_is_tolerated_is_not_written(model_dir, tmp_path):
    folder = write(model_dir, tmp_path / "adapter", make_config("OFT", oft_block_size=4))
    result, out = convert(model_dir, folder, "--rank", "2")
    assert result.exit_code == 1
    assert is_one_line(
        result.stderr, "Error: At rank 2 the error of model.layers.", "larger --rank"
    )
    assert not out.exists()
    result, out = convert(model_dir, folder, "--rank", "2", "--max-error", "1")
    assert result.exit_code == 0
    assert "share of the effect that is kept" in result.stdout


# ---- checkpoints that also take images ----

OF_TEXT = r".*language_model.*\.(q_proj|down_proj)"


@pytest.mark.parametrize(
    ("family", "options", "names"),
    [("gemma3", {}, NEWER_NAMES), ("qwen2_5_vl", {"rope": MROPE, "tied": False}, {})],
)
def test_an_adapter_of_the_text_beside_towers_becomes_a_lora_of_the_text_model(
    tmp_path, family, options, names
):
    model_dir = save_model(tmp_path / "model", family=family, **options)
    rename_tensors(model_dir, names)
    folder = write(model_dir, tmp_path / "adapter", make_config("LoHa", target_modules=OF_TEXT))
    tensors = load_file(converted(model_dir, folder) / WEIGHTS_FILE)
    theirs = merged_effects(model_dir, folder)
    assert len(theirs) == 4
    for name, effect in theirs.items():
        a, b = (tensors[each] for each in lora_names(text_name(name)))
        assert relative(b @ a, effect) < 1e-4


def test_an_adapter_that_changes_a_tower_is_refused_by_the_tensors_name(tmp_path):
    model_dir = save_model(tmp_path / "model", family="gemma3")
    config = make_config("LoHa", target_modules=["q_proj", "fc1"])
    result, out = convert(model_dir, write(model_dir, tmp_path / "adapter", config))
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "It changes or adds model.vision_tower.encoder.layers.0.")
    assert not out.exists()


# ---- initializations that change the base weights ----

INITS = {
    "fast PiSSA, rsLoRA": {"init_lora_weights": "pissa_niter_4", "use_rslora": True},
    "PiSSA, patterns": {
        "init_lora_weights": "pissa", "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 6}
    },
    "OLoRA": {"init_lora_weights": "olora"},
}  # fmt: skip


def write_with_initial(model_dir, folder, changes):
    """Write an adapter and its initial one; returns what it adds to the base weights."""
    torch.manual_seed(2)
    config = make_config("Lora", r=4, lora_alpha=6, **changes)
    model = peft.get_peft_model(fresh_model(model_dir), config)
    model.save_pretrained(folder.with_name("initial"))
    train(model)
    model.save_pretrained(folder)
    return effects(model_dir, model.merge_and_unload())


@pytest.mark.parametrize("case", INITS)
def test_the_initial_adapter_is_subtracted(model_dir, base, tmp_path, case):
    folder, initial = tmp_path / "adapter", tmp_path / "initial"
    theirs = write_with_initial(model_dir, folder, INITS[case])
    before = (initial / CONFIG_FILE).read_bytes()
    result, out = convert(model_dir, folder, "--json", "--initial", str(initial))
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"rank": 8, "worst_error": 0.0}
    ours = effects(model_dir, merged_model(model_dir, out))
    for module, effect in theirs.items():
        assert relative(ours[module], effect) < 1e-4
    validate_adapter((out / CONFIG_FILE).read_bytes(), out / WEIGHTS_FILE, base, AdapterLimits())
    assert (initial / CONFIG_FILE).read_bytes() == before


def test_without_the_initial_adapter_the_error_has_the_call(model_dir, tmp_path):
    folder = tmp_path / "adapter"
    write_with_initial(model_dir, folder, INITS["PiSSA, patterns"])
    result, out = convert(model_dir, folder)
    assert result.exit_code == 2
    call = "model.save_pretrained(OUT, path_initial_model_for_weight_conversion=DIR)"
    assert is_one_line(result.stderr, "Error: ", "init_lora_weights='pissa'", "--initial DIR", call)
    assert not out.exists()


def test_a_rank_is_not_for_an_initial_adapter(model_dir, tmp_path):
    folder = tmp_path / "adapter"
    write_with_initial(model_dir, folder, INITS["OLoRA"])
    arguments = ("--initial", str(tmp_path / "initial"), "--rank", "4")
    result, _ = convert(model_dir, folder, *arguments)
    assert result.exit_code == 2
    assert is_one_line(result.stderr, "Error: --rank is not for --initial")


# ---- what has no LoRA ----


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            make_config("LoHa", modules_to_save=["norm"]),
            "It changes or adds model.layers.0.input_layernorm.weight",
        ),
        (
            # PEFT adds the effects of both to the one weight.
            make_config("Lora", target_modules=["embed_tokens", "lm_head"], use_dora=True),
            "PEFT does not merge it to what it computes",
        ),
        (
            make_config("Lora", use_dora=True, layer_replication=[[0, 1], [0, 1]]),
            "PEFT does not merge it to what it computes, as if layers are replicated",
        ),
        (
            make_config("LNTuning", target_modules=["input_layernorm"]),
            "It changes or adds model.layers.0.input_layernorm.weight",
        ),
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "Its type, PROMPT_TUNING, does not change weights",
        ),
        (make_config("Lora"), "is a LoRA that is served as it is: push it."),
    ],
)
def test_what_no_plain_lora_can_do_is_refused(model_dir, tmp_path, config, sentence):
    folder = write(model_dir, tmp_path / "adapter", config)
    result, out = convert(model_dir, folder)
    assert result.exit_code in (1, 2)
    assert is_one_line(result.stderr, "Error: ", sentence)
    assert not out.exists()


def test_a_tensor_that_peft_leaves_out_is_refused_by_name(model_dir, tmp_path):
    # torchtune writes the magnitudes of DoRA, and a config without use_dora.
    folder = write(model_dir, tmp_path / "adapter", make_config("Lora"))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    tensors = load_file(folder / WEIGHTS_FILE)
    save_file(tensors | {name: torch.ones(64)}, folder / WEIGHTS_FILE)
    result, out = convert(model_dir, folder)
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "Error: ", name)
    assert not out.exists()


def test_another_model_is_one_line(tmp_path, model_dir):
    folder = write(model_dir, tmp_path / "adapter", make_config("LoHa", r=2))
    other = save_model(tmp_path / "other", hidden_size=32)
    result, _ = convert(other, folder)
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "Error: ", "PEFT does not merge it into this model")


@pytest.mark.parametrize(
    ("file", "content"), [("config.json", b"{"), ("model.safetensors", b"cut off")]
)
def test_a_damaged_base_model_is_one_line_with_its_folder(tmp_path, model_dir, file, content):
    folder = write(model_dir, tmp_path / "adapter", make_config("LoHa", r=2))
    shutil.copytree(model_dir, damaged := tmp_path / "damaged")
    (damaged / file).write_bytes(content)
    result, _ = convert(damaged, folder)
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "give the whole folder", f"{damaged} cannot be read")


def test_a_result_that_cannot_be_written_is_one_line(tmp_path, model_dir):
    folder = write(model_dir, tmp_path / "adapter", make_config("LoHa", r=2))
    (tmp_path / "file").touch()
    arguments = ("--model", str(model_dir), "--out", str(tmp_path / "file" / "out"))
    result = CliRunner().invoke(app, ["adapters", "convert", str(folder), *arguments])
    assert is_one_line(result.stderr, f"Error: {tmp_path / 'file' / 'out'}: Not a directory")


def test_nothing_is_overwritten(model_dir, tmp_path):
    folder = write(model_dir, tmp_path / "adapter", make_config("LoHa", r=2))
    kept: Path = tmp_path / "out" / "kept"
    kept.parent.mkdir()
    kept.write_text("mine")
    result, _ = convert(model_dir, folder)
    assert result.exit_code == 2
    assert is_one_line(result.stderr, "Error: ", "is there already")
    assert list(kept.parent.iterdir()) == [kept]


def test_a_machine_without_peft_is_told_what_to_install(model_dir, tmp_path, monkeypatch):
    folder = write(model_dir, tmp_path / "adapter", make_config("LoHa", r=2))
    monkeypatch.setitem(sys.modules, "peft", None)
    result, _ = convert(model_dir, folder)
    assert result.exit_code == 1
    assert is_one_line(result.stderr, "Error: Converting needs peft", "pip install -e '.[convert]'")
