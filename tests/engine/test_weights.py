import pytest
import torch
from safetensors.torch import load_file

from engine.models.weights import StoredWeights
from tests.tiny_models import MIXTRAL, save_model

CPU = torch.device("cpu")


def test_shards_are_the_same_model(tmp_path):
    whole = save_model(tmp_path / "whole", tied=False)
    cut = save_model(tmp_path / "cut", tied=False, max_shard_size="50KB")
    shards = sorted(cut.glob("model-*.safetensors"))
    assert len(shards) > 2
    expected, found = (dict(StoredWeights(folder, torch.float32)) for folder in (whole, cut))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=shards[1].name):
        dict(StoredWeights(cut, torch.float32))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
def test_weights_come_in_the_dtype_asked_for(tmp_path, saved):
    model_dir = save_model(tmp_path / "model", dtype=saved)
    halves = dict(StoredWeights(model_dir, saved))
    wide = dict(StoredWeights(model_dir, torch.float32))
    assert all(torch.equal(wide[name], halves[name].float()) for name in halves)


def test_fused_projections_are_read_as_separate_ones(tmp_path):
    folder = save_model(tmp_path / "model", family="phi3", max_shard_size="50KB")
    weights, tensors = StoredWeights(folder, torch.float32), {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    parts = [weights[f"{attention}.{name}_proj.weight"] for name in "qkv"]
    assert [len(part) for part in parts] == [64, 32, 32]
    assert torch.equal(torch.cat(parts), tensors[f"{attention}.qkv_proj.weight"])
    gate, up = (weights[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(torch.cat((gate, up)), tensors[f"{mlp}.gate_up_proj.weight"])
    name = f"{attention}.k_proj.weight"
    assert weights.shape(name) == (32, 64)
    assert torch.equal(weights.part(name, slice(3, 7)), parts[1][3:7])
    assert len(weights) == len(set(weights)) == len(dict(weights))
    assert not any("qkv_proj" in name or "gate_up_proj" in name for name in weights)


def test_mixtrals_experts_have_the_names_of_other_families(tmp_path):
    folder = save_model(tmp_path / "model", family="mixtral", **MIXTRAL)
    tensors = load_file(folder / "model.safetensors")
    weights, mlp = StoredWeights(folder, torch.float32), "model.layers.1.mlp"
    theirs = "model.layers.1.block_sparse_moe"
    assert torch.equal(weights[f"{mlp}.gate.weight"], tensors[f"{theirs}.gate.weight"])
    for ours, name in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        expected = tensors[f"{theirs}.experts.4.{name}.weight"]
        assert torch.equal(weights[f"{mlp}.experts.4.{ours}_proj.weight"], expected)
        assert weights.shape(f"{mlp}.experts.4.{ours}_proj.weight") == expected.shape
