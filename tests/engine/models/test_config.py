import dataclasses

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.models.experts import Experts
from engine.models.family import Multipliers, SoftCaps
from registry.base.text_config import text_config
from registry.formats.architecture import ARCHITECTURES, COMPOSITES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"]}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
OLMO2 = LLAMA | {"architectures": ["Olmo2ForCausalLM"]}
QWEN3_MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 48}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"]}
GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"]}
QKV = (True, True, True, False, False, False, False)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        (LLAMA, (False,) * 7),
        (LLAMA | {"attention_bias": True}, (True,) * 4 + (False,) * 3),
        (LLAMA | {"mlp_bias": True}, (False,) * 4 + (True,) * 3),
        (MISTRAL, (False,) * 7),
        (QWEN2, QKV),
        (QWEN3, (False,) * 7),
        (QWEN3 | {"attention_bias": True}, (True,) * 4 + (False,) * 3),
        (QWEN3_MOE | {"attention_bias": True}, (True,) * 4 + (False,) * 3),
        (OLMO2 | {"attention_bias": True}, (True,) * 4 + (False,) * 3),
        (GRANITE | {"mlp_bias": True}, (False,) * 4 + (True,) * 3),
    ],
)
def test_each_family_has_its_biases(config, biases):
    assert DecoderConfig.parse(config).biases == biases


QWEN_SLIDES = {"use_sliding_window": True, "sliding_window": 32}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA | {"sliding_window": 32}, (None,) * 4),
        (MISTRAL | {"sliding_window": 32}, (32,) * 4),
        (MISTRAL | {"sliding_window": None}, (None,) * 4),
        (MISTRAL, (4096,) * 4),
        (GEMMA2, (4096, None, 4096, None)),
        (GEMMA3 | {"sliding_window": 32, "sliding_window_pattern": 3}, (32, 32, None, 32)),
        (GEMMA3 | {"sliding_window": 32, "layer_types": MIXED}, (None, 32, 32, None)),
        (PHI3, (None,) * 4),
        (PHI3 | {"sliding_window": 32}, (32,) * 4),
        (QWEN2 | {"sliding_window": 32, "use_sliding_window": False}, (None,) * 4),
        (QWEN2 | {"sliding_window": 32, "max_window_layers": 0}, (None,) * 4),
        (QWEN2 | QWEN_SLIDES, (None,) * 4),
        (QWEN2 | QWEN_SLIDES | {"max_window_layers": 3}, (None, None, None, 32)),
        (QWEN3 | QWEN_SLIDES | {"layer_types": MIXED}, (None, 32, 32, None)),
        (QWEN3_MOE | QWEN_SLIDES, (32,) * 4),
        (QWEN3_MOE | {"sliding_window": 32}, (None,) * 4),
        (MIXTRAL, (None,) * 4),
        (MIXTRAL | {"sliding_window": 32}, (32,) * 4),
    ],
)
def test_each_layer_has_its_window(config, windows):
    assert DecoderConfig.parse(config).windows == windows


def test_the_width_of_heads_is_given_or_follows():
    assert DecoderConfig.parse(LLAMA).shape.head_dim == 16
    assert DecoderConfig.parse(LLAMA | {"head_dim": None}).shape.head_dim == 16
    assert DecoderConfig.parse(MISTRAL | {"head_dim": 32}).shape.head_dim == 32
    assert DecoderConfig.parse(QWEN3).shape.head_dim == 128


def test_only_granite_has_multipliers_and_its_residual_one_is_part_of_scale_and_eps():
    factors = {"embedding_multiplier": 12, "residual_multiplier": 0.5, "logits_scaling": 8}
    factors["attention_multiplier"] = 0.25
    granite, llama = (DecoderConfig.parse(base | factors) for base in (GRANITE, LLAMA))
    assert granite.multipliers == Multipliers(12.0, 0.5, 0.125, 0.25)
    assert granite.embedding_scale(torch.bfloat16) == 24.0
    assert granite.stream_eps == 4 * granite.rms_norm_eps
    assert llama.multipliers == Multipliers()
    assert (llama.embedding_scale(torch.float32), llama.stream_eps) == (1.0, llama.rms_norm_eps)


def test_norms_of_q_and_k_go_over_heads_or_over_projections_or_do_not_exist():
    sizes = [DecoderConfig.parse(config).qk_norm_sizes for config in (LLAMA, QWEN3, OLMO2)]
    assert sizes == [None, (128, 128), (64, 32)]


QWEN3_EXPERTS = Experts(count=128, per_token=8, width=48, norms_weights=False)
FEW = {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
FEW_EXPERTS = Experts(count=6, per_token=2, width=48, norms_weights=True)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (LLAMA, (None,) * 4),
        (QWEN3_MOE, (QWEN3_EXPERTS,) * 4),
        (QWEN3_MOE | FEW, (FEW_EXPERTS,) * 4),
        (QWEN3_MOE | FEW | {"decoder_sparse_step": 2}, (None, FEW_EXPERTS) * 2),
        (QWEN3_MOE | FEW | {"mlp_only_layers": [0, 1, 3]}, (None, None, FEW_EXPERTS, None)),
        (QWEN3_MOE | {"num_experts": 0}, (None,) * 4),
        (MIXTRAL, (Experts(count=8, per_token=2, width=160, norms_weights=True),) * 4),
    ],
)
def test_each_layer_is_dense_or_has_its_experts(config, experts):
    parsed = DecoderConfig.parse(config)
    assert parsed.experts == experts
    assert parsed.used_share == min(e.per_token / e.count if e else 1.0 for e in experts)
    assert parsed.mlp_width == (0 if all(experts) else 160)
    assert parsed.shape.intermediate_size == (0 if any(experts) else 160)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        (LLAMA, "silu"),
        (LLAMA | {"hidden_act": "gelu_pytorch_tanh"}, "gelu_tanh"),
        (GEMMA2 | {"hidden_act": "gelu"}, "gelu_tanh"),
        (GEMMA3 | {"hidden_activation": "silu"}, "silu"),
    ],
)
def test_each_family_has_its_setting_for_the_activation(config, activation):
    assert DecoderConfig.parse(config).activation == activation


GEMMA3_ROPES = {
    "transformers 5": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        }
    },
    "transformers 4": {
        "rope_theta": 10000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}


@pytest.mark.parametrize("spelling", GEMMA3_ROPES)
def test_layers_of_gemma_3_that_slide_have_a_rope_of_their_own(spelling):
    config = GEMMA3 | GEMMA3_ROPES[spelling] | {"sliding_window_pattern": 2}
    ropes = DecoderConfig.parse(config).ropes
    assert ropes.numbers == (0, 1, 0, 1)
    theirs = Gemma3RotaryEmbedding(
        AutoConfig.for_model("gemma3_text", **without(config, "architectures"), head_dim=256)
    )
    for ours, kind in zip(ropes.different, ("sliding", "full"), strict=True):
        expected = getattr(theirs, f"{kind}_attention_inv_freq")
        torch.testing.assert_close(ours.frequencies, expected, rtol=1e-6, atol=0.0)


def test_gemmas_soft_caps_are_those_of_transformers():
    caps = [DecoderConfig.parse(config).soft_caps for config in (GEMMA2, GEMMA3, LLAMA)]
    assert caps == [SoftCaps(50.0, 30.0), SoftCaps(), SoftCaps()]
    given = {"attn_logit_softcapping": None, "final_logit_softcapping": 7.0}
    for config in (GEMMA2, GEMMA3):
        assert DecoderConfig.parse(config | given).soft_caps == SoftCaps(None, 7.0)


def test_kv_heads_default_to_heads():
    assert DecoderConfig.parse(without(LLAMA, "num_key_value_heads")).shape.num_kv_heads == 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_defaults_of_transformers_are_ours(architecture):
    config = AutoConfig.for_model(ARCHITECTURES[architecture])
    ours = DecoderConfig.parse(config.to_dict() | {"architectures": [architecture]})
    silent = DecoderConfig.parse({"architectures": [architecture], **needed(config)})
    for parsed in (ours, silent):
        assert parsed.rms_norm_eps == config.rms_norm_eps
        assert parsed.tie_word_embeddings == config.tie_word_embeddings
        assert parsed.windows[0] == getattr(config, "sliding_window", None)
        head_dim = getattr(config, "head_dim", None)
        assert parsed.shape.head_dim == head_dim or config.hidden_size // config.num_attention_heads


@pytest.mark.parametrize("given", [{}, {"num_attention_heads": 16, "hidden_size": 4096}])
@pytest.mark.parametrize("name", COMPOSITES)
def test_what_a_text_config_leaves_out_has_the_values_of_transformers(name, given):
    composite = COMPOSITES[name]
    written = [given]
    if composite.model_type == "llava":
        written += [given | {"model_type": kind} for kind in ("mistral", "qwen2")]
    for text in written:
        read = AutoConfig.for_model(composite.model_type, text_config=text)
        whole = read.text_config.to_dict() | {"tie_word_embeddings": read.tie_word_embeddings}
        ours, theirs = (
            DecoderConfig.parse(text_config({"architectures": [name], "text_config": each}))
            for each in (text, whole)
        )
        for field in dataclasses.fields(DecoderConfig):
            if field.name == "ropes":
                assert ours.ropes.numbers == theirs.ropes.numbers
                frequencies = [[r.frequencies for r in c.ropes.different] for c in (ours, theirs)]
                assert all(map(torch.equal, *frequencies))
            # A Mistral 3 that says nothing of ties is tied by what its files hold.
            elif (name, field.name) != ("Mistral3ForConditionalGeneration", "tie_word_embeddings"):
                assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


def needed(config):
    keys = [key for key in LLAMA if key != "architectures"]
    return {key: getattr(config, key) for key in keys}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        (LLAMA | {"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        (LLAMA | {"architectures": None, "model_type": "gemma3"}, "gemma3"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act gelu"),
        (GEMMA2 | {"hidden_activation": "relu"}, "hidden_activation relu"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters of .*rope_type"),
        (GEMMA3 | {"layer_types": ["sliding_attention"] * 3}, "3 layers of 4"),
        (LLAMA | {"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (QWEN2 | {"layer_types": ["full_attention"] * 3}, "3 layers of 4"),
        (without(LLAMA, "vocab_size"), "vocab_size"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "it has no text_config"),
        (
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
            "'llama4' with the text model 'llama4_text', which needs attention in chunks",
        ),
        (
            {
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "text_config": {"model_type": "qwen3_5_text"},
            },
            "which needs linear attention; served are .*Qwen3VLForConditionalGeneration",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "phi"}},
            "'llava' with the text model 'phi'; served are",
        ),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_name(config, named):
    with pytest.raises(UnsupportedModel, match=named):
        DecoderConfig.parse(config)


def test_a_model_type_stands_in_for_missing_architectures():
    config = without(LLAMA, "architectures") | {"model_type": "qwen2"}
    assert DecoderConfig.parse(config).biases == QKV
