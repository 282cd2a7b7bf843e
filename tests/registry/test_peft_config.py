import json

import pytest

from registry.errors import InvalidAdapter, TooLarge
from registry.peft_config import MAX_PATTERNS, PeftConfig
from registry.peft_format import ModuleScale
from tests.registry.factories import make_config

Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
UP1 = "model.layers.1.mlp.up_proj"


def refused(raw):
    with pytest.raises(InvalidAdapter) as caught:
        PeftConfig.parse(raw)
    return caught.value


def parse(**changes):
    return PeftConfig.parse(make_config(**changes))


def test_the_scale_is_alpha_over_rank():
    assert parse(r=4, lora_alpha=8).effect(Q0) == ModuleScale(4, 2.0)


def test_rslora_divides_by_the_root_of_the_rank():
    assert parse(r=16, lora_alpha=8, use_rslora=True).effect(Q0) == ModuleScale(16, 2.0)


def test_the_scale_is_a_float32():
    assert parse(r=3, lora_alpha=1).effect(Q0).scale == 0.3333333432674408


def test_patterns_give_a_module_its_own_rank_and_alpha():
    config = parse(rank_pattern={"layers.0.self_attn.q_proj": 2}, alpha_pattern={r"layers\.1.*": 2})
    assert config.effect(Q0) == ModuleScale(2, 4.0)
    assert config.effect(Q1) == ModuleScale(4, 0.5)


def test_the_first_pattern_that_matches_wins():
    assert parse(rank_pattern={"q_proj": 2, Q0: 8}).effect(Q0).rank == 2
    assert parse(rank_pattern={Q0: 8, "q_proj": 2}).effect(Q0).rank == 8


def test_targets_are_names_or_endings_at_a_dot():
    config = parse(target_modules=["q_proj", "layers.1.mlp.up_proj", "roj"])
    assert [config.targets(module) for module in (Q0, Q1, UP1)] == [True, True, True]
    assert not config.targets("model.layers.0.mlp.up_proj")


def test_targets_may_be_one_pattern():
    config = parse(target_modules=r"model\.layers\.1\..*")
    assert [config.targets(module) for module in (Q0, Q1, UP1)] == [False, True, True]


def test_all_linear_targets_everything():
    config = parse(target_modules="all-linear")
    assert [config.targets(module) for module in (Q0, Q1, UP1)] == [True, True, True]


def test_the_ends_are_targeted_by_name_and_by_pattern_but_not_by_all_linear():
    def ends(**changes):
        config = parse(**changes)
        return [config.targets(module) for module in ("model.embed_tokens", "lm_head")]

    assert ends(target_modules=["embed_tokens", "lm_head"]) == [True, True]
    assert ends(target_modules=".*") == [True, True]
    assert ends(target_modules="all-linear") == [False, False]
    # They are in no layer, so only their full names reach past layers_to_transform.
    names = ["embed_tokens", "lm_head", "q_proj"]
    assert ends(target_modules=names, layers_to_transform=[0]) == [False, True]
    assert ends(target_modules=".*", modules_to_save=["embed_tokens"]) == [False, True]


def test_excluded_modules_are_not_targeted():
    config = parse(target_modules="all-linear", exclude_modules=["q_proj"])
    assert [config.targets(module) for module in (Q0, Q1, UP1)] == [False, False, True]


@pytest.mark.parametrize("layers", [[1], 1])
def test_layers_to_transform_keeps_the_other_layers_out(layers):
    config = parse(target_modules=["q_proj", "up_proj"], layers_to_transform=layers)
    assert [config.targets(module) for module in (Q0, Q1, UP1)] == [False, True, True]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("lora_bias", True),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 1]]),
        ("layers_pattern", "layers"),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts"]),
        ("megatron_config", {"a": 1}),
        ("auto_mapping", {"base_model_class": "LlamaForSequenceClassification"}),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "code": "evil.py"}),
        ("auto_mapping", ["LlamaForCausalLM"]),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"cache_file": "/etc/passwd"}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
    ],
)
def test_a_feature_that_is_not_served_is_refused_by_name(key, value):
    error = refused(make_config(**{key: value}))
    assert (error.code, error.param) == ("unsupported_feature", key)
    assert key in str(error)


def test_null_false_and_empty_ask_for_nothing():
    nothing = {"use_dora": False, "modules_to_save": None, "loftq_config": {}, "new_thing": None}
    assert parse(**nothing, layers_pattern="") == parse()


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


def test_the_class_that_was_wrapped_may_stand_for_the_task():
    mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models"}
    assert parse(task_type=None, auto_mapping=mapping) == parse()


def test_how_an_adapter_was_initialised_is_nothing_to_serving():
    assert parse(init_lora_weights="eva", eva_config={"rho": 2.0}) == parse()


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
        ("target_modules", None),
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


def test_many_costly_patterns_are_refused():
    patterns = {f".*.*.*{n}": 4 for n in range(5)}
    assert refused(make_config(rank_pattern=patterns)).param == "rank_pattern"


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
    assert PeftConfig.parse(raw).effect(last).rank == 4
    assert json.loads(raw)["rank_pattern"] == names


def test_more_patterns_than_any_model_has_modules_are_refused():
    names = {f"q{n}": 4 for n in range(MAX_PATTERNS + 1)}
    assert refused(make_config(alpha_pattern=names)).param == "alpha_pattern"
