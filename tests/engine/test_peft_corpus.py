"""Each option of PEFT's LoraConfig gives the tokens of PEFT or is refused by name.

PEFT writes the files. A test fails if the installed PEFT has an option that no case sets, neither
here nor in tests.corpus.
"""

import dataclasses
import json

import peft
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import config as options
from safetensors.torch import load_file, save_file

from registry.errors import InvalidAdapter
from registry.formats import peft_config
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE
from tests.corpus.cases import CASES
from tests.corpus.world import INVOCATION, PROMPTS, World, make_config, randomize

SERVED = {
    "what PEFT takes for this model": {"r": 8, "lora_alpha": 8, "target_modules": None},
    "activated, patterns, rsLoRA": {
        "alora_invocation_tokens": INVOCATION,
        "use_rslora": True,
        "rank_pattern": {"layers.0.self_attn.q_proj": 3, r".*\.o_proj": 12, "o_proj": 2},
        "alpha_pattern": {r"layers\.1\..*": 9, "^model.layers.0.self_attn.q_proj": 5},
    },
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "random from the start": {"init_lora_weights": False},
    "EVA": {"init_lora_weights": "eva", "eva_config": options.EvaConfig(rho=2.0)},
    "what is of no use when serving": {
        "lora_dropout": 0.5, "peft_version": "0.1", "base_model_name_or_path": "me/tiny",
        "revision": "main", "inference_mode": True, "megatron_core": "somewhere.else",
        "qalora_group_size": 8,  # of a QALoRA that is off
        # PEFT does not save this option.
        "runtime_config": options.LoraRuntimeConfig(ephemeral_gpu_offload=True),
    },
    "saved, but not trained": {"modules_to_save": ["norm", "lm_head", "embed_tokens"]},
    "both ends, patterns": {
        "target_modules": ["q_proj", "model.embed_tokens", "lm_head"],
        "layers_to_transform": [0],
        "rank_pattern": {"lm_head": 11, "embed_tokens": 3},
        "alpha_pattern": {"embed_tokens": 7},
    },
    "tied": {"ensure_weight_tying": True, "target_modules": ["up_proj", "embed_tokens"]},
    # PEFT corrects this option for linear layers, with a warning.
    "fan in fan out": {"fan_in_fan_out": True},
    "LoRA-GA's options": {"lora_ga_config": options.LoraGAConfig()},
    "CorDA's paths": {"corda_config": options.CordaConfig(cache_file="/etc/passwd")},
    "VeLoRA": {"velora_config": options.VeloraConfig()},
    "MonteCLoRA": {"monteclora_config": options.MontecloraConfig()},
    "LoftQ's options": {"loftq_config": {"loftq_bits": 4}},
    "blocks that are whole": {
        "use_bdlora": options.BdLoraConfig(target_modules_bd_b=["q_proj"], match_strict=False)
    },
}  # fmt: skip

# Some of them PEFT only writes: its models need scipy, megatron or statistics, which are missing.
REFUSED = {
    "all biases": {"bias": "all"},
    "biases beside LoRA": {"bias": "lora_only"},
    "a mapping to code": {
        "auto_mapping": {"base_model_class": "LlamaForCausalLM", "auto_map": "evil.py"}
    },
    "fast PiSSA": {"init_lora_weights": "pissa_niter_4"},
    "OLoRA": {"init_lora_weights": "olora"},
    "MiCA": {"init_lora_weights": "mica"},
    "LoRA-GA": {"init_lora_weights": "lora_ga", "lora_ga_config": options.LoraGAConfig()},
    "QALoRA": {"use_qalora": True},
    "KaSA": {"kasa_config": options.KasaConfig()},
    "CorDA": {"init_lora_weights": "corda", "corda_config": options.CordaConfig()},
    "LoftQ": {"init_lora_weights": "loftq"},
    "megatron": {"megatron_config": {"hidden_size": 64}},
    "block diagonal": {"use_bdlora": options.BdLoraConfig(nblocks=2)},
    "arrow": {"arrow_config": options.ArrowConfig()},
}

METHODS = {
    "IA3": {"target_modules": ["k_proj"], "feedforward_modules": []},
    "LoHa": {"target_modules": ["q_proj"]},
    "PromptTuning": {"num_virtual_tokens": 4},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("corpus"))


def write(world, folder, changes):
    """Save an adapter with PEFT; its random weights change the model's answers."""
    model = world.adapted(changes)
    if "eva_config" in changes:
        batch = torch.tensor([PROMPTS[1]])
        batches = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)}] * 4
        peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    randomize(model)
    model.save_pretrained(folder)


@pytest.mark.parametrize("case", SERVED)
def test_an_option_that_is_served_says_what_peft_says(world, tmp_path, case):
    write(world, tmp_path, SERVED[case])
    answers = world.answers(tmp_path)
    assert answers != world.base_says
    world.assert_peft_says(tmp_path, answers)


def refusal(world, folder):
    with pytest.raises(InvalidAdapter) as caught:
        world.validate(folder)
    return caught.value


@pytest.mark.parametrize("case", REFUSED)
def test_an_option_that_is_not_served_is_refused_by_name(world, tmp_path, case):
    write(world, tmp_path, {})
    config = make_config({})
    for key, value in REFUSED[case].items():
        setattr(config, key, value)
    config.save_pretrained(tmp_path)
    error = refusal(world, tmp_path)
    assert error.param.partition(".")[0] in REFUSED[case]
    assert error.param in str(error)


def test_halves_of_a_tied_lora_that_differ_are_refused(world, tmp_path):
    changes = {"ensure_weight_tying": True, "target_modules": ["embed_tokens"]}
    write(world, tmp_path, changes)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    tensors["base_model.model.lm_head.lora_A.weight"][0, 0] += 1
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    error = refusal(world, tmp_path)
    assert (error.code, error.param) == ("unsupported_feature", "ensure_weight_tying")


@pytest.mark.parametrize("method", METHODS)
def test_another_method_is_refused_by_its_name(world, tmp_path, method):
    config = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **METHODS[method])
    peft.get_peft_model(world.fresh_model(), config).save_pretrained(tmp_path)
    error = refusal(world, tmp_path)
    assert error.param == "peft_type"
    assert config.peft_type.value in str(error)


def test_no_option_of_this_peft_is_in_no_case():
    cases = [*SERVED.values(), *REFUSED.values(), *(case.options for case in CASES)]
    # Every config has peft_type; other methods have cases of their own.
    tried = {"peft_type"} | {key for case in cases for key in case}
    assert {field.name for field in dataclasses.fields(LoraConfig)} == tried


def test_every_key_that_this_peft_writes_is_known(world, tmp_path):
    write(world, tmp_path, {})
    known = peft_config._READ | peft_config._IGNORED | peft_config._UNSUPPORTED
    assert set(json.loads((tmp_path / CONFIG_FILE).read_bytes())) <= known
