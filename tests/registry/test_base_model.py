import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from registry.base.base_model import BaseModel, UnsupportedBaseModel
from registry.formats.architecture import ARCHITECTURES, EXPERT_ARCHITECTURES, FUSED_ARCHITECTURES
from tests.quantized_models import save_quantized
from tests.registry.factories import encode, make_base, make_tensor, write_base
from tests.tiny_models import MIXTRAL, NEWER_NAMES, QWEN3_MOE, rename_tensors, save_model


def load(folder):
    return BaseModel.load(folder, "tiny-llama", folder.parent / "cache")


def refused(folder):
    with pytest.raises(UnsupportedBaseModel) as caught:
        load(folder)
    return str(caught.value)


def split_into_shards(folder, tensors):
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        (folder / shard).write_bytes(encode({name: tensors[name] for name in members}))
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "model.safetensors").unlink()


def test_the_modules_are_the_seven_projections_of_every_layer(tmp_path):
    base = make_base(tmp_path / "model", num_layers=2)
    assert len(base.modules) == 14
    assert base.modules["model.layers.0.self_attn.q_proj"] == (16, 16)
    assert base.modules["model.layers.1.self_attn.k_proj"] == (16, 8)
    assert base.modules["model.layers.1.mlp.down_proj"] == (24, 16)
    assert base.config["num_hidden_layers"] == 2


@pytest.mark.parametrize("kind", ["gptq", "awq", "W4A16", "W8A16 groups", "W8A8", "FP8"])
def test_a_quantised_module_has_the_features_of_its_weight(tmp_path, kind):
    whole = save_model(tmp_path / "float", num_hidden_layers=1, intermediate_size=192)
    folder, _ = save_quantized(whole, tmp_path, kind)
    assert load(folder).modules == load(whole).modules
    assert load(folder).base_revision != load(whole).base_revision


def test_the_revision_does_not_depend_on_how_the_weights_are_cut_into_files(tmp_path):
    whole = make_base(tmp_path / "whole")
    tensors = write_base(tmp_path / "cut")
    split_into_shards(tmp_path / "cut", tensors)
    cut = load(tmp_path / "cut")
    assert cut.base_revision == whole.base_revision
    assert cut.modules == whole.modules


def test_other_weights_or_another_config_are_another_revision(tmp_path):
    revisions = {make_base(tmp_path / str(seed), seed=seed).base_revision for seed in range(2)}
    write_base(tmp_path / "config")
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "rope_theta": 5}
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    assert len({*revisions, load(tmp_path / "config").base_revision}) == 3


def test_the_same_bytes_in_another_dtype_are_another_revision(tmp_path):
    first = make_base(tmp_path / "f16").base_revision
    tensors = write_base(tmp_path / "u8")
    name = "model.embed_tokens.weight"
    dtype, shape, raw = tensors[name]
    tensors[name] = ("I32", shape, raw)
    (tmp_path / "u8" / "model.safetensors").write_bytes(encode(tensors))
    assert load(tmp_path / "u8").base_revision != first


def test_the_revision_is_computed_once(tmp_path):
    base = make_base(tmp_path / "model")
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_text(cache.read_text().replace(base.base_revision, "0" * 64))
    assert load(tmp_path / "model").base_revision == "0" * 64
    assert base.base_revision != "0" * 64


def test_a_damaged_cache_is_computed_again(tmp_path):
    base = make_base(tmp_path / "model")
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_bytes(b"\xff half")
    assert load(tmp_path / "model").base_revision == base.base_revision


def test_changed_files_are_hashed_again(tmp_path):
    before = make_base(tmp_path / "model").base_revision
    write_base(tmp_path / "model", seed=9)
    assert load(tmp_path / "model").base_revision != before


def test_a_folder_of_pickles_is_refused_by_name(tmp_path):
    write_base(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refused(tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "num_hidden_layers": 2}, "GPT2LMHeadModel"),
        ({"model_type": "gpt2", "num_hidden_layers": 2}, "gpt2"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "num_hidden_layers": 2}, "Qwen2MoeForCausalLM"),
        ({"architectures": "LlamaForCausalLM", "num_hidden_layers": 2}, "served are Llama"),
        ({"architectures": ["LlamaForCausalLM"]}, "num_hidden_layers"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}, "layers.2.self_attn.q"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(tmp_path, config, reason):
    write_base(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert reason in refused(tmp_path / "model")


def test_fused_modules_count_as_one_where_the_architecture_has_them(tmp_path):
    folder = save_model(tmp_path / "model", family="phi3")
    modules = BaseModel.load(folder, "tiny", tmp_path / "cache").modules
    assert len(modules) == 8
    assert modules["model.layers.0.self_attn.qkv_proj"] == (64, 128)
    assert modules["model.layers.1.mlp.gate_up_proj"] == (64, 320)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [item for item in ARCHITECTURES.items() if item[0] not in FUSED_ARCHITECTURES],
)
def test_served_architectures_are_known_by_class_or_else_by_model_type(
    tmp_path, architecture, model_type
):
    write_base(tmp_path / "model")
    for said in ({"architectures": [architecture]}, {"model_type": model_type}):
        (tmp_path / "model" / "config.json").write_text(
            json.dumps({**said, "num_hidden_layers": 2})
        )
        num_modules = 8 if architecture in EXPERT_ARCHITECTURES else 14
        assert len(load(tmp_path / "model").modules) == num_modules


def test_an_empty_or_absent_folder_is_refused(tmp_path):
    assert "config.json" in refused(tmp_path / "absent")


def test_truncated_weights_are_refused(tmp_path):
    write_base(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "its header describes" in refused(tmp_path / "model")


@pytest.mark.parametrize("shard", ["gone.safetensors", "../model/a.safetensors"])
def test_an_index_that_names_files_outside_the_folder_is_refused(tmp_path, shard):
    tensors = write_base(tmp_path / "model")
    split_into_shards(tmp_path / "model", tensors)
    index = json.dumps({"weight_map": {"x": shard}})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    assert shard in refused(tmp_path / "model")


def test_tied_embeddings_and_extra_tensors_do_not_matter(tmp_path):
    tensors = write_base(tmp_path / "model")
    tensors["lm_head.weight"] = make_tensor(np.ones((7, 16)))
    (tmp_path / "model" / "model.safetensors").write_bytes(encode(tensors))
    assert len(load(tmp_path / "model").modules) == 14


@pytest.mark.parametrize(("family", "options"), [("qwen3_moe", QWEN3_MOE), ("mixtral", MIXTRAL)])
def test_of_a_mixture_of_experts_adapters_may_change_attention_only(tmp_path, family, options):
    base = load(save_model(tmp_path / "model", family=family, **options))
    assert len(base.modules) == 8
    assert all(".self_attn." in name for name in base.modules)
    assert not any(".experts." in name for name in base.tensors)
    assert any(name.endswith(".gate.weight") for name in base.tensors)


def change_towers(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    towers = {name: torch.ones(3) for name in tensors if "vision" in name}
    assert towers
    save_file(tensors | towers, path)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_size"] = 7
    (folder / "config.json").write_text(json.dumps(config))


def test_of_a_checkpoint_that_also_takes_images_the_text_model_is_the_base(tmp_path):
    folder = save_model(tmp_path / "model", family="gemma3")
    base = load(folder)
    assert base.config["architectures"] == ["Gemma3ForCausalLM"]
    assert base.modules.keys() == load(save_model(tmp_path / "text")).modules.keys()
    assert base.ends == {"model.embed_tokens": (292, 64), "lm_head": (64, 292)}
    assert base.tensors["lm_head.weight"] == base.tensors["model.embed_tokens.weight"]
    assert all(name.startswith(("model.", "lm_head.")) for name in base.tensors)
    assert not any("vision" in name or "projector" in name for name in base.tensors)
    for change in (change_towers, lambda folder: rename_tensors(folder, NEWER_NAMES)):
        change(folder)
        assert load(folder).base_revision == base.base_revision


def test_two_names_of_one_tensor_are_refused_with_both(tmp_path):
    tensors = write_base(tmp_path / "model")
    name = "layers.0.mlp.up_proj.weight"
    tensors[f"model.language_model.{name}"] = tensors[f"model.{name}"]
    split_into_shards(tmp_path / "model", tensors)
    both = (f"'model.{name}'", f"'model.language_model.{name}'")
    assert all(one in refused(tmp_path / "model") for one in both)
