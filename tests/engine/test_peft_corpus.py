"""Each option of PEFT's LoraConfig gives the tokens of PEFT's merged model or is refused by name.

PEFT writes the files. A test fails if the installed PEFT has an option that no case sets.
"""

import dataclasses
import json

import peft
import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import config as options
from safetensors.torch import load_file, save_file

from registry.checks.validate import AdapterLimits
from registry.errors import InvalidAdapter
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE
from tests.corpus.world import INVOCATION, PROMPTS, World, randomize
from tests.engine.real_core import add_adapter
from tests.oracle import merged_model
from tests.registry.factories import validate_adapter
from tests.tiny_models import ALL_TARGETS

UP_DOWN = r"model\.layers\.\d+\.mlp\.(up|down)_proj"
PARTS = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
UNSLOTH = (
    rf"(?:.*?(?:language|text).*?{PARTS}.*?(?:q_proj|up_proj).*?)"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.{PARTS}\.(?:(?:q_proj|up_proj)))"
)
SWIFT = r"^(model(?!.*(experts|visual))).*\.(q_proj|up_proj)$"
MIXED = {
    "rank_pattern": {"layers.0.self_attn.q_proj": 3, r".*\.o_proj": 12, "o_proj": 2},
    "alpha_pattern": {r"layers\.1\..*": 9, "^model.layers.0.self_attn.q_proj": 5},
}

SERVED = {
    "plain": {},
    "what PEFT takes for this model": {"r": 8, "lora_alpha": 8, "target_modules": None},
    "odd scale": {"r": 3, "lora_alpha": 7, "target_modules": ["up_proj"]},
    "rsLoRA": {"r": 6, "use_rslora": True},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": UP_DOWN},
    "names in full": {"target_modules": ["model.layers.1.mlp.up_proj", "layers.0.mlp.up_proj"]},
    "one layer": {"layers_to_transform": 1},
    "a list of layers": {"layers_to_transform": [0], "target_modules": ["k_proj", "down_proj"]},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["q_proj", "k_proj"]},
    "excluded by regex": {"target_modules": "all-linear", "exclude_modules": UP_DOWN},
    "rank pattern": {"rank_pattern": MIXED["rank_pattern"]},
    "alpha pattern": {"alpha_pattern": MIXED["alpha_pattern"]},
    "rank and alpha pattern": MIXED,
    "rank and alpha pattern, rsLoRA": {"use_rslora": True, **MIXED},
    "rank and alpha pattern, one layer": {
        "layers_to_transform": [0],
        "rank_pattern": MIXED["rank_pattern"],
        "alpha_pattern": {"self_attn.q_proj": 3, ".*up_proj": 11},
    },
    "activated": {"alora_invocation_tokens": INVOCATION},
    "activated, patterns, rsLoRA": {
        "alora_invocation_tokens": INVOCATION, "use_rslora": True, **MIXED
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
    # PEFT saves the class that it wrapped in place of the task.
    "no task": {"task_type": None},
    "a task and the class": {
        "auto_mapping": {
            "base_model_class": "LlamaForCausalLM", "parent_library": "os", "unsloth_fixed": True
        }
    },
    "saved, but not trained": {"modules_to_save": ["norm", "lm_head", "embed_tokens"]},
    "the head": {"target_modules": ["lm_head"]},
    "the head by regex": {
        "target_modules": r".*(lm_head|up_proj)", "alpha_pattern": {"lm_head": 3}
    },
    "the embedding": {"target_modules": ["embed_tokens"], "r": 12, "use_rslora": True},
    "both ends": {"target_modules": [*ALL_TARGETS, "embed_tokens", "lm_head"], "r": 9},
    "both ends, patterns": {
        "target_modules": ["q_proj", "model.embed_tokens", "lm_head"],
        "layers_to_transform": [0],
        "rank_pattern": {"lm_head": 11, "embed_tokens": 3},
        "alpha_pattern": {"embed_tokens": 7},
    },
    "trained tokens": {"trainable_token_indices": [5, 7, 200]},
    "tied": {"ensure_weight_tying": True, "target_modules": ["up_proj", "embed_tokens"]},
    "tied by the head": {"ensure_weight_tying": True, "target_modules": ["lm_head", "q_proj"]},
    "nothing tied": {"ensure_weight_tying": True},
    "the head, activated": {
        "target_modules": ["v_proj", "lm_head"], "alora_invocation_tokens": INVOCATION
    },
    # PEFT corrects this option for linear layers, with a warning.
    "fan in fan out": {"fan_in_fan_out": True},
    "another task": {"task_type": "SEQ_CLS"},
    "a class of another task": {
        "auto_mapping": {"base_model_class": "LlamaForSequenceClassification"}
    },
    "layer pattern": {"layers_pattern": "layers", "layers_to_transform": [1]},
    "LoRA-GA's options": {"lora_ga_config": options.LoraGAConfig()},
    "CorDA's paths": {"corda_config": options.CordaConfig(cache_file="/etc/passwd")},
    "VeLoRA": {"velora_config": options.VeloraConfig()},
    "MonteCLoRA": {"monteclora_config": options.MontecloraConfig()},
    "LoftQ's options": {"loftq_config": {"loftq_bits": 4}},
    "blocks that are whole": {
        "use_bdlora": options.BdLoraConfig(target_modules_bd_b=["q_proj"], match_strict=False)
    },
    "Unsloth's expression": {"target_modules": UNSLOTH},
    "ms-swift's expression": {"target_modules": SWIFT},
}  # fmt: skip

REFUSED = {
    "DoRA": {"use_dora": True},
    "LoRA bias": {"lora_bias": True},
    "all biases": {"bias": "all"},
    "biases beside LoRA": {"bias": "lora_only"},
    "a mapping to code": {
        "auto_mapping": {"base_model_class": "LlamaForCausalLM", "auto_map": "evil.py"}
    },
    "layers twice": {"layer_replication": [[0, 2], [1, 2]]},
    "parameters": {
        "target_parameters": ["mlp.up_proj.weight"], "target_modules": ["q_proj"]
    },
    "PiSSA": {"init_lora_weights": "pissa"},
    "fast PiSSA": {"init_lora_weights": "pissa_niter_4"},
    "OLoRA": {"init_lora_weights": "olora"},
    "MiCA": {"init_lora_weights": "mica"},
    "LoRA-GA": {"init_lora_weights": "lora_ga", "lora_ga_config": options.LoraGAConfig()},
    "QALoRA": {"use_qalora": True},
    "KaSA": {"kasa_config": options.KasaConfig()},
}  # fmt: skip

# PEFT writes these configs, but its models need scipy, megatron or statistics, which are missing.
ONLY_WRITTEN = {
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


def make_config(changes):
    return LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS}
        | changes
    )


def write(world, folder, changes, dtype=torch.float32):
    """Save an adapter with PEFT; its random weights change the model's answers."""
    torch.manual_seed(3)
    model = peft.get_peft_model(world.fresh_model(), make_config(changes))
    if "eva_config" in changes:
        batch = torch.tensor([PROMPTS[1]])
        batches = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)}] * 4
        peft.initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    randomize(model, dtype)
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def assert_merged_says(model_dir, adapter_dir, prompts, answers):
    model = merged_model(model_dir, adapter_dir)
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(-1).tolist()


def assert_served(world, folder):
    adapter = add_adapter(world.objects, world.model_dir, folder, world.folder)
    answers = world.tokens(adapter, PROMPTS)
    assert answers != world.base_says
    assert_merged_says(world.model_dir, folder, PROMPTS, answers)


@pytest.mark.parametrize("case", SERVED)
def test_an_option_that_is_served_says_what_the_merged_model_says(world, tmp_path, case):
    assert_served(world, write(world, tmp_path / "adapter", SERVED[case]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_half_the_bytes_say_what_the_merged_model_says(world, tmp_path, dtype):
    folder = write(world, tmp_path / "adapter", MIXED, dtype)
    assert_served(world, folder)


def validate(world, folder):
    config = (folder / CONFIG_FILE).read_bytes()
    return validate_adapter(config, folder / WEIGHTS_FILE, world.base, AdapterLimits())


def refusal(world, folder):
    with pytest.raises(InvalidAdapter) as caught:
        validate(world, folder)
    return caught.value


@pytest.mark.parametrize("case", REFUSED)
def test_an_option_that_is_not_served_is_refused_by_name(world, tmp_path, case):
    error = refusal(world, write(world, tmp_path, REFUSED[case]))
    assert error.param.partition(".")[0] in REFUSED[case]
    assert error.param in str(error)


@pytest.mark.parametrize("case", ONLY_WRITTEN)
def test_an_option_that_only_its_config_shows_is_refused_by_name(world, tmp_path, case):
    write(world, tmp_path, {})
    config = make_config({})
    for key, value in ONLY_WRITTEN[case].items():
        setattr(config, key, value)
    config.save_pretrained(tmp_path)
    error = refusal(world, tmp_path)
    assert error.param in ONLY_WRITTEN[case]
    assert error.param in str(error)


def test_halves_of_a_tied_lora_that_differ_are_refused(world, tmp_path):
    changes = {"ensure_weight_tying": True, "target_modules": ["embed_tokens"]}
    write(world, tmp_path, changes)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    tensors["base_model.model.lm_head.lora_A.weight"][0, 0] += 1
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    error = refusal(world, tmp_path)
    assert (error.code, error.param) == ("unsupported_feature", "ensure_weight_tying")


def test_an_embedding_that_was_saved_beside_lora_changes_nothing(world, tmp_path):
    model = peft.get_peft_model(world.fresh_model(), make_config({}))
    randomize(model)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    passport = validate(world, tmp_path / "adapter")
    # The first warning is that the folder of the base model has another name.
    assert passport.warnings[1:] == [
        f"The files have a copy of the base model's {name}, which was not trained; left out."
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    ]
    assert_served(world, tmp_path / "adapter")


@pytest.mark.parametrize("method", METHODS)
def test_another_method_is_refused_by_its_name(world, tmp_path, method):
    config = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **METHODS[method])
    peft.get_peft_model(world.fresh_model(), config).save_pretrained(tmp_path)
    error = refusal(world, tmp_path)
    assert error.param == "peft_type"
    assert config.peft_type.value in str(error)


def test_no_option_of_this_peft_is_in_no_case():
    cases = [*SERVED.values(), *REFUSED.values(), *ONLY_WRITTEN.values()]
    # Every config has peft_type; other methods have cases of their own.
    tried = {"peft_type"} | {key for case in cases for key in case}
    assert {field.name for field in dataclasses.fields(LoraConfig)} == tried


def test_every_key_that_this_peft_writes_is_known(world, tmp_path):
    from registry.formats import peft_config

    write(world, tmp_path, {})
    known = peft_config._READ | peft_config._IGNORED | peft_config._UNSUPPORTED
    assert set(json.loads((tmp_path / CONFIG_FILE).read_bytes())) <= known
