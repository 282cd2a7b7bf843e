import json

import pytest

from registry.errors import InvalidAdapter, TooLarge
from registry.formats.peft_config import MAX_PATTERNS, PeftConfig
from tests.registry.factories import make_config

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


def refused(raw):
    with pytest.raises(InvalidAdapter) as caught:
        PeftConfig.parse(raw)
    return caught.value


def parse(**changes):
    return PeftConfig.parse(make_config(**changes))


def test_a_full_name_reaches_past_the_layers_to_transform():
    config = parse(target_modules=["embed_tokens", "lm_head", "q_proj"], layers_to_transform=[0])
    assert [config.targets(end) for end in ("model.embed_tokens", "lm_head")] == [False, True]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("lora_bias", True),
        ("bias", "all"),
        ("layer_replication", [[0, 1]]),
        ("target_parameters", ["experts"]),
        ("megatron_config", {"a": 1}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1e-4}),
        ("peft_type", "LOHA"),
    ],
)
def test_a_feature_that_is_not_served_is_refused_by_name(key, value):
    error = refused(make_config(**{key: value}))
    assert (error.code, error.param) == ("unsupported_feature", key)
    assert key in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", False),
        ("modules_to_save", None),
        ("loftq_config", {}),
        ("new_thing", None),
        ("new_thing", {"enabled": False, "of": [{"b": None}]}),
        ("layers_pattern", ""),
        ("layers_pattern", []),
        ("use_bdlora", {"nblocks": 1, "target_modules_bd_b": ["q_proj"], "match_strict": True}),
        # how a model is loaded, how an adapter begins, how it is trained
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("eva_config", {"rho": 2.0, "tau": 0.99}),
        ("corda_config", {"corda_method": "ipm", "cache_file": "/tmp/cache"}),
        ("loftq_config", {"loftq_bits": 4, "loftq_iter": 1}),
        ("lora_ga_config", {"direction": "ArB2r"}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 64}),
        ("qalora_group_size", 16),
        ("lorap_lr_ratio", 16.0),
        ("fan_in_fan_out", True),
        # which class was wrapped; nothing is loaded by its name
        ("auto_mapping", {"base_model_class": "LlamaForSequenceClassification"}),
        ("auto_mapping", {"base_model_class": "Gemma3ForConditionalGeneration",
                          "parent_library": "transformers.models.gemma3", "unsloth_fixed": True}),
    ],
)  # fmt: skip
def test_what_changes_no_computation_is_accepted(key, value):
    assert parse(**{key: value}) == parse()


@pytest.mark.parametrize("task", ["FEATURE_EXTRACTION", "SEQ_CLS", None])
def test_any_task_may_have_trained_the_layers(task):
    assert parse(task_type=task).task_type == task


def test_a_class_and_nothing_else_may_be_mapped():
    error = refused(make_config(auto_mapping={"base_model_class": "A", "code": "evil.py"}))
    assert (error.code, error.param) == ("unsupported_feature", "auto_mapping.code")
    assert refused(make_config(auto_mapping=["LlamaForCausalLM"])).param == "auto_mapping"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fine_tune_type": "lora"}, "adapters push"),
        ({"lora_parameters": {"rank": 4}}, "mlx-lm"),
        ({}, "save_pretrained"),
    ],
)
def test_a_config_without_a_type_says_who_writes_such(changes, word):
    error = refused(make_config(peft_type=None, **changes))
    assert (error.code, error.param) == ("invalid_config", "peft_type")
    assert word in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_newra", True),
        ("auto_map", {"AutoModel": "evil.py"}),
        ("custom_modules", {"a": "b"}),
        ("_attn_implementation_internal", "someone/kernels"),
        ("trust_remote_code", True),
        ("cache_file", "/etc/passwd"),
        ("covariance_file", "../x"),
    ],
)
def test_code_paths_and_other_unknown_keys_are_refused_by_name(key, value):
    error = refused(make_config(**{key: value}))
    assert error.code == "unknown_config_key"
    assert key in str(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", 10**400),
        ("r", "4"),
        ("r", True),
        ("r", None),
        ("lora_alpha", 0),
        ("lora_alpha", -1),
        ("lora_alpha", 10**400),
        ("lora_alpha", "8"),
        ("use_rslora", "yes"),
        ("rank_pattern", [4]),
        ("rank_pattern", {"q_proj": 1.5}),
        ("alpha_pattern", {"q_proj": None}),
        ("target_modules", [1]),
        ("layers_to_transform", "1"),
        ("layers_to_transform", [True]),
        ("alora_invocation_tokens", []),
        ("alora_invocation_tokens", False),
        ("alora_invocation_tokens", "<|fox|>"),
        ("alora_invocation_tokens", 7),
        ("alora_invocation_tokens", [True]),
        ("alora_invocation_tokens", [1.0]),
        ("alora_invocation_tokens", [3, -1]),
        ("alora_invocation_tokens", [1] * 65),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_key(key, value):
    error = refused(make_config(**{key: value}))
    assert (error.code, error.param) == ("invalid_config", key)


def test_invocation_tokens_make_an_activated_lora():
    assert parse(alora_invocation_tokens=[5, 0, 5]).invocation_tokens == (5, 0, 5)
    assert parse(alora_invocation_tokens=[1] * 64).invocation_tokens == (1,) * 64
    assert parse(alora_invocation_tokens=None).invocation_tokens is None
    assert parse().invocation_tokens is None


def test_invocation_tokens_are_for_plain_lora():
    error = refused(make_config(alora_invocation_tokens=[5], use_dora=True))
    assert (error.code, error.param) == ("unsupported_feature", "use_dora")


def test_layers_and_a_pattern_do_not_go_together():
    error = refused(make_config(target_modules=".*", layers_to_transform=[1]))
    assert error.param == "layers_to_transform"


LOOKAHEAD = r"model\.layers\.\d+(?!.*experts).*\.(q_proj|v_proj)"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", LOOKAHEAD),
        ("target_modules", None),
        ("exclude_modules", LOOKAHEAD),
        ("layers_pattern", "(?=l)layers"),
        ("rank_pattern", {LOOKAHEAD: 4}),
    ],
)
def test_what_cannot_be_matched_in_linear_time_is_not_compared(key, value):
    config = parse(**{key: value})
    assert config.not_compared == (key,)
    assert config.announces_modules == (key == "rank_pattern")
    assert config.rank(Q0) == (None if key == "rank_pattern" else 4)


def test_a_scale_that_cannot_be_found_in_linear_time_is_refused():
    error = refused(make_config(alpha_pattern={LOOKAHEAD: 4}))
    assert (error.code, error.param) == ("unsupported_pattern", "alpha_pattern")


@pytest.mark.parametrize("pattern", ["layers", ["layers"], ["blocks", "layers"], "model.layers"])
def test_a_layer_is_found_behind_its_pattern(pattern):
    config = parse(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=pattern)
    assert [config.targets(module) for module in (Q0, Q1)] == [False, True]
    config = parse(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="blocks")
    assert not config.targets(Q1)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"\x80\x04", "invalid_json"),
        (b"[" * 60_000, "invalid_json"),
        (make_config(loftq_config={"a": {"b": {"c": {}}}}), "invalid_json"),
        (b'{"a": "' + b'\\"' * 30_000, "invalid_json"),
        (make_config().replace(b"8", b"NaN"), "invalid_json"),
        (make_config()[:-1] + b', "r": 8}', "duplicate_key"),
        (make_config(rank_pattern={"a": 1}).replace(b'"a": 1', b'"a": 1, "a": 2'), "duplicate_key"),
    ],
)
def test_what_is_not_strict_json_is_refused(raw, code):
    assert refused(raw).code == code


def test_brackets_in_a_string_nest_nothing():
    assert parse(revision='[[[[[["[{{{{') == parse()


def test_a_config_over_64_kib_is_too_large():
    with pytest.raises(TooLarge):
        PeftConfig.parse(make_config(revision="x" * 65_536))


def test_the_largest_config_is_read_quickly():
    names = {f"base.model.model.layers.{n}.self_attn.q_proj": 4 for n in range(MAX_PATTERNS)}
    raw = make_config(rank_pattern=names)
    assert 50_000 < len(raw) <= 65_536
    last = f"base.model.model.layers.{MAX_PATTERNS - 1}.self_attn.q_proj"
    assert PeftConfig.parse(raw).rank(last) == 4
    assert json.loads(raw)["rank_pattern"] == names


def test_more_patterns_than_any_model_has_modules_are_refused():
    names = {f"q{n}": 4 for n in range(MAX_PATTERNS + 1)}
    assert refused(make_config(alpha_pattern=names)).param == "alpha_pattern"
