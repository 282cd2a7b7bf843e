"""Quantised checkpoints are read as their formats say, whole and in parts; others are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import UnsupportedModel
from engine.models.formats.quantization import format_of
from engine.models.weights import ShardedWeights, open_weights
from kernels.quantized import Fp8Weight, QuantizedWeight, Rounding, as_numbers
from lora.shard import Shard
from tests.quantized_models import KINDS, save_quantized
from tests.tiny_models import rename_tensors, save_model

ROUNDED_AGAIN = {"gptq act-order", "W8A16 groups"}
"""Kinds that have no product of their own, and are rounded to 8 bits when they are read."""
FORMS = {
    "gptq": Rounding(4, 32),
    "gptq zeros": Rounding(4, 32, has_zeros=True),
    "gptq v2": Rounding(4, 64, has_zeros=True),
    "awq": Rounding(4, 32, has_zeros=True),
    "W4A16": Rounding(4, 32),
    "W4A16 zeros": Rounding(4, 64, has_zeros=True),
    "W4A16 channel": Rounding(4),
    "W8A8": Rounding(8),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float") / "model"
    return save_model(folder, intermediate_size=192, num_hidden_layers=1, attention_bias=True)


@pytest.fixture(scope="module", params=KINDS)
def case(request, model_dir, tmp_path_factory):
    """(kind, weights as they are read, tensors of the twin)"""
    folders = save_quantized(model_dir, tmp_path_factory.mktemp("quantized"), request.param)
    twin = load_file(folders[1] / "model.safetensors")
    return request.param, open_weights(folders[0], torch.float32), twin


def assert_alike(kind, found, expected):
    if kind in ROUNDED_AGAIN:
        assert (found - expected).norm() <= 0.01 * expected.norm()
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_weights_are_what_the_format_means(case):
    kind, weights, twin = case
    assert set(weights) == set(twin)
    for name, expected in twin.items():
        assert weights.shape(name) == expected.shape
        assert_alike(kind, as_numbers(weights[name]), expected)


def test_a_weight_keeps_its_codes_where_there_are_products_of_them(case):
    kind, weights, _ = case
    weight = weights["model.layers.0.mlp.down_proj.weight"]
    if kind in FORMS:
        assert weight.rounding == FORMS[kind]
    elif kind in ROUNDED_AGAIN:
        assert weight.rounding == Rounding(8)
    else:
        assert isinstance(weight, torch.Tensor if "block" in kind else Fp8Weight)


def test_a_part_of_a_weight_is_the_same_part_of_its_numbers(case):
    kind, weights, twin = case
    name = "model.layers.0.mlp.down_proj.weight"
    for rows in (slice(0, 64), slice(8, 27), slice(63, 64), slice(5, 12)):
        assert_alike(kind, as_numbers(weights.part(name, rows)), twin[name][rows])
    for columns in (slice(0, 64), slice(64, 192), slice(128, 192)):
        part = weights.part(name, columns=columns)
        assert_alike(kind, as_numbers(part), twin[name][:, columns])


def test_ranks_together_have_the_whole_weight(case):
    kind, weights, twin = case
    ranks = [ShardedWeights(weights, Shard(index, 2)) for index in range(2)]
    for module, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1)):
        name = f"model.layers.0.{module}.weight"
        found = torch.cat([as_numbers(rank[name]) for rank in ranks], dim)
        assert_alike(kind, found, twin[name])


def test_ranks_do_not_cut_a_group(model_dir, tmp_path):
    folder, _ = save_quantized(model_dir, tmp_path, "gptq v2")
    weights = ShardedWeights(open_weights(folder, torch.float32), Shard(0, 2))
    with pytest.raises(UnsupportedModel, match="down_proj has groups of 64 inputs, .* ranks"):
        weights["model.layers.0.mlp.down_proj.weight"]


@pytest.fixture(scope="module")
def narrow_dir(tmp_path_factory):
    """A model of whose inputs, 96 and 160, groups of 64 leave the last one with 32."""
    folder = tmp_path_factory.mktemp("narrow") / "model"
    return save_model(folder, hidden_size=96, num_hidden_layers=1)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_last_group_that_is_smaller_has_its_own_scale(has_index, narrow_dir, tmp_path):
    folder, twin = save_quantized(narrow_dir, tmp_path, "gptq v2")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if not has_index:
        save_file({k: v for k, v in tensors.items() if not k.endswith("g_idx")}, path)
    weights, expected = open_weights(folder, torch.float32), load_file(twin / path.name)
    for name in expected:
        assert_alike("gptq act-order", as_numbers(weights[name]), expected[name])


def test_a_group_size_that_the_scales_contradict_is_refused_by_name(model_dir, tmp_path):
    folder, _ = save_quantized(model_dir, tmp_path, "awq")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"group_size": 32', '"group_size": 128'))
    weights = open_weights(folder, torch.float32)
    said = r"down_proj has 6 groups of scales for 192 inputs, but its group_size is 128"
    with pytest.raises(UnsupportedModel, match=said):
        weights["model.layers.0.mlp.down_proj.weight"]


def test_modules_that_a_checkpoint_leaves_alone_are_floats(model_dir, tmp_path):
    folder, _ = save_quantized(model_dir, tmp_path, "W4A16")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj"
    for kind in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{name}.{kind}"]
    tensors[f"{name}.weight"] = torch.ones(32, 64)
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(folder, torch.float32)
    assert torch.equal(weights[f"{name}.weight"], torch.ones(32, 64))
    assert isinstance(weights["model.layers.0.self_attn.v_proj.weight"], QuantizedWeight)


def test_a_tensor_that_is_missing_is_named(model_dir, tmp_path):
    folder, _ = save_quantized(model_dir, tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(folder, torch.float32)
    with pytest.raises(UnsupportedModel, match=r"no tensor model\.layers\.0\.mlp\.up_proj\.scales"):
        weights["model.layers.0.mlp.up_proj.weight"]


# ---- what is not served ----

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def scheme(**values):
    return PACKED | {"config_groups": {"group_0": {"weights": INT4 | values}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes.*dequantize\(\)"),
        ({"quant_method": "mxfp4"}, r"mxfp4.*Mxfp4Config\(dequantize=True\)"),
        ({"quant_method": "gguf"}, "gguf.*gguf_file="),
        ({"quant_method": "torchao"}, "torchao is not served; awq, .*llm-compressor"),
        ({"bits": 4}, "None is not served"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq"}, "cannot be read: KeyError"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*1": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "gemv"),
        (PACKED, r"compressed-tensors in \[\]"),
        (scheme() | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (scheme(num_bits=3), "type int with 3 bits"),
        (scheme() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (
            PACKED | {"config_groups": {"a": {"weights": INT4},
                                        "b": {"weights": INT4 | {"num_bits": 8}}}},
            "several numbers of bits",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name_with_advice(config, said):
    with pytest.raises(UnsupportedModel, match=said):
        format_of({"quantization_config": config})


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_a_checkpoint_of_floats_has_no_format(config):
    assert format_of(config) is None


def test_modules_that_gptqmodel_leaves_alone_do_not_matter():
    config = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:model\\.layers\\.0\\..*": {}}}
    assert format_of({"quantization_config": config}).rounding == Rounding(4)


def test_a_quantised_text_model_beside_floating_towers_is_read(model_dir, tmp_path):
    folder, _ = save_quantized(model_dir, tmp_path, "W4A16")
    alone = dict(open_weights(folder, torch.float32))
    rename_tensors(folder, {"model.": "model.language_model."})
    path = folder / "model.safetensors"
    towers = {"model.vision_tower.layers.0.mlp.up_proj.weight": torch.ones(3, 3)}
    save_file(load_file(path) | towers, path)
    config = json.loads((folder / "config.json").read_text())
    whole = {key: config.pop(key) for key in ("quantization_config", "dtype")}
    whole |= {"model_type": "llava", "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    weights = open_weights(folder, torch.float32)
    assert set(weights) == set(alone)
    assert weights.is_quantized
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(as_numbers(weights[name]), as_numbers(alone[name]))
