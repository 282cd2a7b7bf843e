import pytest
import torch

from engine.weights import StoredWeights
from tests.tiny_models import save_model

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
