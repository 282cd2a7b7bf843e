import io
from dataclasses import replace

import numpy as np
import pytest

from registry.base.base_model import BaseModel
from registry.base.base_tensor import BaseTensor, digest_of
from registry.checks.validate import AdapterLimits, check_adapter
from registry.errors import InvalidAdapter, TooLarge
from registry.formats.peft_format import ModuleScale, lora_names
from tests.registry.factories import (
    encode,
    make_adapter,
    make_config,
    make_tensor,
    validate_adapter,
)
from tests.tiny_models import QWEN3_MOE, save_model

LIMITS = AdapterLimits()
A0, B0 = lora_names("model.layers.0.self_attn.q_proj")


def check(base, tensors, config=None, limits=LIMITS):
    weights = tensors if isinstance(tensors, bytes) else encode(tensors)
    return check_adapter(config or make_config(), io.BytesIO(weights), base, limits)


def refused(base, tensors, config=None, limits=LIMITS):
    with pytest.raises(InvalidAdapter) as caught:
        check(base, tensors, config, limits)
    return caught.value


def with_tensor(base, name, tensor):
    return make_adapter(base) | {name: tensor}


def test_the_passport_says_what_the_adapter_is(base, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(encode(make_adapter(base, dtype="BF16")))
    passport = validate_adapter(make_config(), path, base, LIMITS)
    assert passport.rank == 4
    assert passport.ranks == {"4": 4}
    assert passport.num_modules == 4
    assert passport.targets == ["q_proj", "v_proj"]
    assert passport.dtype == "BF16"
    assert passport.num_parameters == 2 * (4 * 16 + 16 * 4 + 4 * 16 + 8 * 4)
    assert passport.warnings == []
    assert passport.invocation_tokens is None


def test_the_passport_says_which_tokens_invoke_an_activated_lora(base):
    checked = check(
        replace(base, config=base.config | {"vocab_size": 7}),
        make_adapter(base),
        make_config(alora_invocation_tokens=[6, 0]),
    )
    assert checked.passport.invocation_tokens == [6, 0]
    assert checked.passport.lora_format == "alora"
    assert checked.adapter.invocation_tokens == (6, 0)


def test_an_invocation_token_that_the_base_does_not_have_is_refused(base):
    base = replace(base, config=base.config | {"vocab_size": 7})
    error = refused(base, make_adapter(base), make_config(alora_invocation_tokens=[6, 7]))
    assert (error.code, error.param) == ("invalid_config", "alora_invocation_tokens")
    assert "below 7" in str(error)


def test_ranks_are_counted_per_module(base):
    tensors = make_adapter(base, targets=["q_proj"], rank=2)
    tensors |= make_adapter(base, targets=["v_proj"], rank=4)
    checked = check(base, tensors, make_config(rank_pattern={"q_proj": 2}))
    assert checked.passport.ranks == {"2": 2, "4": 2}
    assert checked.adapter.modules["model.layers.0.self_attn.q_proj"] == ModuleScale(2, 4.0)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_or_an_infinity_is_found_in_every_dtype(base, dtype, value):
    tensors = make_adapter(base, dtype=dtype)
    values = np.ones((4, 16), np.float32)
    values[3, 15] = value
    error = refused(base, tensors | {A0: make_tensor(values, dtype)})
    assert error.code == "not_finite"
    assert A0 in str(error)


def test_the_largest_and_the_smallest_numbers_that_every_engine_can_hold_are_served(base):
    values = np.full((4, 16), -65504.0, np.float32)
    values[0] = np.finfo(np.float32).smallest_subnormal
    passport = check(base, with_tensor(base, A0, make_tensor(values))).passport
    assert passport.max_value == 65504.0


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_float16_cannot_hold_is_refused(base, dtype, sign):
    values = np.ones((4, 16), np.float32)
    values[3, 15] = sign * 66_000.0
    error = refused(base, with_tensor(base, A0, make_tensor(values, dtype)))
    assert error.code == "value_too_large"
    assert A0 in str(error)


def test_an_adapter_whose_squares_vanish_is_still_one(base):
    tiny = {
        name: make_tensor(np.full(tensor[1], 1e-30, np.float32))
        for name, tensor in make_adapter(base).items()
    }
    assert check(base, tiny).passport.max_value == np.float32(1e-30)


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_an_adapter_that_adds_zero_has_no_effect(base, half):
    tensors = {
        name: make_tensor(np.zeros(tensor[1])) if half in name else tensor
        for name, tensor in make_adapter(base).items()
    }
    assert refused(base, tensors).code == "no_effect"


def test_no_tensors_have_no_effect(base):
    assert refused(base, {}).code == "no_effect"


def test_a_single_zero_module_is_a_warning(base):
    passport = check(base, with_tensor(base, B0, make_tensor(np.zeros((16, 4))))).passport
    assert passport.warnings == ["1 of 4 modules are zero, the first is " + A0[17:-14] + "."]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(A0, (4, 15)), (A0, (64,)), (A0, (4, 4, 4)), (B0, (15, 4)), (B0, (4, 16)), (A0, (16, 4))],
)
def test_a_shape_that_is_not_the_base_models_is_wrong(base, name, shape):
    error = refused(base, with_tensor(base, name, make_tensor(np.ones(shape))))
    assert error.code == "wrong_shape"
    assert "[4, 16]" in str(error) or "rank, 16" in str(error)


def test_half_a_pair_is_refused(base):
    tensors = make_adapter(base)
    del tensors[B0]
    error = refused(base, tensors)
    assert error.code == "unpaired_tensor"
    assert B0 in str(error)


def test_a_rank_other_than_the_configs_is_refused(base):
    assert refused(base, make_adapter(base, rank=8)).code == "rank_mismatch"
    error = refused(base, with_tensor(base, A0, make_tensor(np.ones((3, 16)))))
    assert error.code == "rank_mismatch"


def test_a_rank_over_the_limit_is_refused(base):
    limits = AdapterLimits(max_rank=3)
    assert refused(base, make_adapter(base), limits=limits).code == "rank_too_large"


@pytest.mark.parametrize(
    "module", ["model.layers.2.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"]
)
def test_a_module_that_the_base_does_not_have_is_refused_by_name(base, module):
    name = lora_names(module)[0]
    error = refused(base, with_tensor(base, name, make_tensor(np.ones((4, 16)))))
    assert error.code == "unknown_module"
    assert module in str(error)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model.layers.0.self_attn.q_proj.lora_a", "mlx-lm"),
        ("layers.0.attn.q_proj.lora_a.weight", "torchtune's checkpointer"),
        ("model.decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "NeMo"),
        ("base_model.model.score.weight", "classifier"),
        ("base_model.model.model.layers.0.input_layernorm.weight", "whole weight"),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
            "train without DoRA",
        ),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "lora_bias=False"),
        ("weights", "no form that is known"),
        ("base_model.model.model.embed_tokens.lora_A.weight", ""),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.token_adapter.trainable_tokens_delta",
            "",
        ),
        ("base_model.model.lm_head.weight", ""),
        ("base_model.model.lm_head.lora_embedding_A", ""),
    ],
)
def test_a_tensor_that_is_no_lora_says_what_to_do(base, name, advice):
    error = refused(base, with_tensor(base, name, make_tensor(np.ones(4))))
    assert (error.code, advice in str(error)) == ("unsupported_feature", True), str(error)
    assert name in str(error)


def test_a_tensor_without_values_says_how_to_gather_them(base):
    error = refused(base, with_tensor(base, A0, make_tensor(np.ones(0))))
    assert error.code == "empty_tensor"
    assert "has no values" in str(error)
    assert "ZeRO-3" in str(error)


def test_two_names_of_one_tensor_are_both_shown(base):
    other = A0.replace(".weight", ".sales.weight")
    error = refused(base, with_tensor(base, other, make_tensor(np.ones((4, 16)))))
    assert error.code == "duplicate_tensor"
    assert A0 in str(error)
    assert other in str(error)


def test_an_endless_name_is_refused_before_it_is_read(base):
    error = refused(base, with_tensor(base, "x_" * 600 + ".lora_A", make_tensor(np.ones(4))))
    assert (error.code, "1207 characters" in str(error)) == ("invalid_header", True)


def test_half_a_pair_of_a_tower_is_refused_by_name(base):
    name = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
    error = refused(base, with_tensor(base, name, make_tensor(np.ones((4, 8)))))
    assert (error.code, name in str(error)) == ("unsupported_feature", True)


def test_tensors_that_only_training_uses_are_left_out(base):
    extra = A0.replace(".lora_A.weight", ".lora_velora_embed")
    checked = check(base, make_adapter(base) | {extra: make_tensor(np.ones(8))})
    (warning,) = checked.passport.warnings
    assert "only training uses" in warning
    assert extra in warning


def test_a_dtype_that_is_not_served_is_refused(base):
    error = refused(base, with_tensor(base, A0, make_tensor(np.ones((4, 16)), "F64")))
    assert error.code == "unsupported_dtype"


def test_a_targeted_module_without_tensors_is_refused(base):
    error = refused(base, make_adapter(base), make_config(target_modules="all-linear"))
    assert error.code == "target_mismatch"
    assert "k_proj" in str(error)


@pytest.mark.parametrize("changes", [{}, {"alpha_pattern": {"q_proj": 4100}, "lora_alpha": 1}])
def test_a_scale_that_no_training_has_is_refused_by_its_key(base, changes):
    error = refused(base, make_adapter(base), make_config(**{"lora_alpha": 4100} | changes))
    assert (error.code, error.param) == ("scale_too_large", "lora_alpha")
    assert "1025" in str(error)
    check(base, make_adapter(base), make_config(lora_alpha=4096))


def test_the_passport_counts_modules_by_effective_scale(base):
    config = make_config(alpha_pattern={"layers.0.self_attn.q_proj": 3})
    passport = check(base, make_adapter(base), config).passport
    assert passport.scales == {"0.75": 1, "2": 3}
    assert passport.lora_format == "lora"


def test_warnings_are_few_however_much_there_is_to_warn_of(base):
    targets = ["q_proj", "v_proj", *(f"x{n}" for n in range(2000))]
    warnings = check(
        base, make_adapter(base), make_config(target_modules=targets)
    ).passport.warnings
    assert len(warnings) == 21
    assert "1980 more" in warnings[-1]


@pytest.mark.parametrize(("targets", "number"), [(["q_proj"], 2), ("q_proj", 4), ([], 4)])
def test_a_module_that_has_tensors_is_served_though_peft_would_leave_it_out(base, targets, number):
    checked = check(base, make_adapter(base), make_config(target_modules=targets))
    assert len(checked.adapter.modules) == 4
    (warning,) = checked.passport.warnings
    assert f"does not target {number} of 4 modules" in warning
    assert "PEFT would leave them out" in warning


def test_a_file_over_the_limit_is_too_large(base):
    with pytest.raises(TooLarge):
        check(base, make_adapter(base), limits=AdapterLimits(max_adapter_bytes=100))


def test_dora_is_refused_before_its_tensors_are_read(base):
    assert refused(base, b"", make_config(use_dora=True)).param == "use_dora"


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (make_config(base_model_name_or_path="meta/other"), "meta/other"),
        (make_config(target_modules=["q_proj", "v_proj", "query"]), "query"),
        (make_config(rank_pattern={"k_proj": 8}), "k_proj"),
        (make_config(alpha_pattern={"k_proj": 8}), "k_proj"),
        (make_config(lora_alpha=1000), "alpha is large"),
        (make_config(task_type="SEQ_CLS"), "SEQ_CLS"),
    ],
)
def test_what_is_odd_but_servable_is_a_warning(base, config, word):
    (warning,) = check(base, make_adapter(base), config).passport.warnings
    assert word in warning


@pytest.mark.parametrize(
    "trained_on",
    [
        "/home/me/tiny-llama/",
        "C:\\models\\Tiny-Llama",
        "/x/models--org--tiny-llama/snapshots/1a2b",
    ],
)
def test_the_base_models_name_is_compared_without_its_folder(base, trained_on):
    config = make_config(base_model_name_or_path=trained_on)
    assert check(base, make_adapter(base), config).passport.warnings == []


def test_the_passport_says_that_the_adapter_was_trained_on_quantised_weights(base):
    config = make_config(base_model_name_or_path="unsloth/tiny-llama-bnb-4bit")
    named, quantised = check(base, make_adapter(base), config).passport.warnings
    assert "trained on 'unsloth/tiny-llama-bnb-4bit'; served here is tiny-llama" in named
    assert "quantised in training" in quantised


def test_a_module_far_larger_than_the_others_is_a_warning(base):
    tensors = with_tensor(base, B0, make_tensor(np.full((16, 4), 1000.0)))
    (warning,) = check(base, tensors).passport.warnings
    assert "times the median" in warning


# ---- the embedding and the head ----

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ENDS = make_config(target_modules=["q_proj", "embed_tokens", "lm_head"])


def with_ends(base, rank=4, **shapes):
    """An adapter of q_proj and both ends. shapes: of tensors in place of the right ones."""
    tensors = make_adapter(base, targets=["q_proj"])
    for module, (in_features, out_features) in base.ends.items():
        names = lora_names(module)
        for name, shape in zip(names, ((rank, in_features), (out_features, rank)), strict=True):
            values = np.full(shapes.get(name, shape), 0.5)
            tensors[name] = make_tensor(values)
    return tensors


def test_the_ends_are_checked_as_modules_behind_the_projections(base):
    checked = check(base, with_ends(base), ENDS)
    assert list(checked.adapter.modules)[-2:] == [EMBEDDING, HEAD]
    assert checked.passport.targets == ["q_proj", "embed_tokens", "lm_head"]
    assert checked.passport.warnings == []


def test_an_end_of_another_vocabulary_is_refused(base):
    error = refused(base, with_ends(base, **{lora_names(HEAD)[1]: (8, 4)}), ENDS)
    assert (error.code, "B [7, rank]" in str(error)) == ("wrong_shape", True)
    error = refused(base, with_ends(base, **{lora_names(EMBEDDING)[0]: (4, 8)}), ENDS)
    assert (error.code, "A [rank, 7]" in str(error)) == ("wrong_shape", True)


def test_of_a_tied_model_a_warning_says_which_end_changes(base):
    tied = replace(base, config=base.config | {"tie_word_embeddings": True})
    (warning,) = check(tied, with_ends(base), ENDS).passport.warnings
    assert "LoRA changes only the one that it names" in warning


def test_an_activated_embedding_is_refused(base):
    base = replace(base, config=base.config | {"vocab_size": 7})
    config = make_config(
        target_modules=["q_proj", "embed_tokens", "lm_head"], alora_invocation_tokens=[1]
    )
    assert refused(base, with_ends(base), config).param == "alora_invocation_tokens"


# ---- copies of the base model's tensors ----


def test_the_copy_of_a_norm_that_was_trained_is_refused(base):
    norm = BaseTensor("F32", (16,), digest_of("F32", (16,), [bytes(64)]))
    base = replace(base, tensors=base.tensors | {"model.norm.weight": norm})
    copy = {"base_model.model.model.norm.weight": make_tensor(np.ones(16))}
    error = refused(base, make_adapter(base) | copy)
    assert (error.code, error.param) == ("unsupported_feature", "modules_to_save")
    assert "modules_to_save trained model.norm.weight" in str(error)


def test_the_copy_of_a_projection_is_no_copy(base):
    name = "base_model.model.model.layers.0.self_attn.q_proj.weight"
    adapter = make_adapter(base) | {name: make_tensor(np.ones((16, 16)))}
    assert "is neither lora_A nor lora_B" in str(refused(base, adapter))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A Qwen3-MoE whose first layer is dense."""
    folder = tmp_path_factory.mktemp("mixture")
    save_model(folder / "model", family="qwen3_moe", **QWEN3_MOE)
    return BaseModel.load(folder / "model", "tiny-moe", folder / "cache")


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.1.mlp.experts.3.gate_proj",
        "model.layers.1.mlp.experts.0.down_proj",
        "model.layers.1.mlp.gate",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.block_sparse_moe.experts.0.w1",
    ],
)
def test_lora_on_experts_and_their_router_is_refused_by_name(mixture, module):
    check(mixture, make_adapter(mixture))
    name, _ = lora_names(module)
    error = refused(mixture, with_tensor(mixture, name, make_tensor(np.ones((4, 64)))))
    assert (error.code, error.param) == ("unsupported_feature", "adapter_model.safetensors")
    assert name in str(error)
    assert "LoRA on experts" in str(error)


def test_all_experts_of_a_large_mixture_are_refused_by_the_name_of_one(mixture):
    tensor = make_tensor(np.ones((1, 4)))
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}_proj.lora_{side}.weight":
        tensor
        for layer in range(48) for expert in range(128) for name in ("gate", "up", "down")
        for side in "AB"
    }  # fmt: skip
    error = refused(mixture, tensors)
    assert (error.code, "mlp.experts.0" in str(error)) == ("unsupported_feature", True)
