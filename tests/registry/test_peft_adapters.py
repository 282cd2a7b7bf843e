"""Ranks and scales of adapters that PEFT wrote are those that PEFT computes.

tests/engine/test_peft_corpus.py runs every option of PEFT through the engine.
"""

import io
import warnings

import numpy as np
import pytest

from registry.base_model import BaseModel
from registry.peft_config import CONFIG_FILE
from registry.peft_format import WEIGHTS_FILE, lora_names, write_canonical
from registry.validate import AdapterLimits, check_adapter
from tests.registry.factories import parse_canonical

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CASES = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "odd_scale": {"r": 3, "lora_alpha": 7, "target_modules": ["up_proj"]},
    "rslora": {"r": 6, "lora_alpha": 8, "use_rslora": True, "target_modules": ["k_proj"]},
    "all_linear": {"r": 2, "lora_alpha": 2, "target_modules": "all-linear"},
    "one_layer": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj"],
        "layers_to_transform": [1],
    },
    "excluded": {"r": 2, "target_modules": "all-linear", "exclude_modules": ["q_proj", "k_proj"]},
    "regex": {"r": 2, "target_modules": r"model\.layers\.\d+\.mlp\.(up|down)_proj"},
    "rank_pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, r".*\.o_proj": 6, "o_proj": 3},
    },
    "alpha_pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "alpha_pattern": {r"layers\.1\..*": 3, "^model.layers.0.self_attn.q_proj": 5},
        "rank_pattern": {"v_proj": 5},
        "use_rslora": True,
    },
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return BaseModel.load(folder / "model", "tiny", folder / "cache")


def write_adapter(llama, folder, **config):
    """Save a random adapter with PEFT, and return PEFT's scaling by module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM.from_pretrained(llama.path)
        config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **config})
        model = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    scalings = {
        name.removeprefix("base_model.model."): module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }
    return scalings


@pytest.mark.parametrize("case", CASES)
def test_effective_ranks_and_scales_are_those_of_peft(llama, tmp_path, case):
    scalings = write_adapter(llama, tmp_path, **CASES[case])
    config = (tmp_path / CONFIG_FILE).read_bytes()
    data = (tmp_path / WEIGHTS_FILE).read_bytes()
    checked = check_adapter(config, io.BytesIO(data), llama, AdapterLimits())
    assert {name: m.scale for name, m in checked.modules.items()} == {
        name: float(np.float32(scaling)) for name, scaling in scalings.items()
    }
    # One warning is expected: the base model was loaded from a folder of another name.
    assert [w for w in checked.passport.warnings if "trained on" not in w] == []


def test_the_canonical_object_holds_the_tensors_that_safetensors_reads(llama, tmp_path):
    from safetensors.torch import load_file

    write_adapter(llama, tmp_path, **CASES["rank_pattern"])
    config = (tmp_path / CONFIG_FILE).read_bytes()
    weights = tmp_path / WEIGHTS_FILE
    checked = check_adapter(config, weights, llama, AdapterLimits())
    out = io.BytesIO()
    with weights.open("rb") as source:
        info = write_canonical(out, source, checked.header, checked.modules)
    assert info.size_bytes == checked.passport.size_bytes
    (tmp_path / "object.safetensors").write_bytes(out.getvalue())
    original, canonical = load_file(weights), load_file(tmp_path / "object.safetensors")
    assert original.keys() == canonical.keys()
    assert all(torch.equal(original[name], canonical[name]) for name in original)
    adapter = parse_canonical(out.getvalue())
    for module, effect in adapter.modules.items():
        assert original[lora_names(module)[0]].shape[0] == effect.rank


def test_the_base_model_of_transformers_is_read(llama):
    assert llama.modules["model.layers.1.self_attn.v_proj"] == (32, 16)
    assert llama.modules["model.layers.0.mlp.down_proj"] == (48, 32)
    assert len(llama.modules) == 14
