"""RoPE frequencies equal those that transformers derives from the same config.json."""

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from engine.errors import UnsupportedModel
from engine.models.family import FAMILIES
from engine.models.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1 + i / 100 for i in range(64)],
    "long_factor": [1 + i / 3 for i in range(64)],
}
CASES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, narrow": {**YARN, "original_max_position_embeddings": 64, "factor": 32.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2.5},
    "yarn, attention factor": {**YARN, "attention_factor": 0.75},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4},
    "yarn, no factor": {**YARN, "factor": None},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": LONGROPE,
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.25},
}


def theirs(rope, **config):
    """The rotary embedding of transformers for heads of 128 features."""
    values = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131072}
    return LlamaRotaryEmbedding(LlamaConfig(**values | config, rope_parameters=dict(rope)))


def spelled(rope, how):
    if how == "transformers 5":
        return {"rope_parameters": rope, "max_position_embeddings": 131072}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if how == "type":
        scaling["type"] = scaling.pop("rope_type")
    config = {"rope_theta": rope["rope_theta"], "max_position_embeddings": 131072}
    return config | {"rope_scaling": None if "default" in scaling.values() else scaling}


@pytest.mark.parametrize("how", ["transformers 5", "transformers 4", "type"])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_attention_factor_and_tables_are_those_of_transformers(case, how):
    reference = theirs(CASES[case])
    rope = Rope.parse(spelled(CASES[case], how), head_dim=128)
    torch.testing.assert_close(rope.frequencies, reference.inv_freq, rtol=1e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)
    expected = reference(torch.zeros(1), torch.arange(4096)[None])
    for ours, both_halves in zip(rope.tables(4096), expected, strict=True):
        # The bound is one unit in the last place of a frequency times 4096 positions.
        torch.testing.assert_close(ours, both_halves[0, :, :64], rtol=0.0, atol=4096 * 2**-23)


def test_an_original_length_beside_the_dict_comes_first_and_the_whole_length_last():
    inside = {"rope_scaling": LLAMA3, "max_position_embeddings": 4096}
    without = {**LLAMA3}
    del without["original_max_position_embeddings"]

    def frequencies(config):
        return Rope.parse(config, head_dim=64).frequencies

    beside = {**inside, "original_max_position_embeddings": 256}
    expected = frequencies({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 256}})
    assert torch.equal(frequencies(beside), expected)
    expected = frequencies({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}})
    assert torch.equal(frequencies({**inside, "rope_scaling": without}), expected)


def phi3(factor=1.0, **config):
    values = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131072}
    rope = {**LONGROPE, "partial_rotary_factor": factor}
    rope |= {name: rope[name][: int(64 * factor)] for name in ("short_factor", "long_factor")}
    return Phi3Config(**values | config, rope_parameters=rope)


@pytest.mark.parametrize("factor", [1.0, 0.75])
@pytest.mark.parametrize("length", [4096, 4097])
def test_longrope_has_one_rope_for_all_sequences_of_a_server_that_of_its_longest(length, factor):
    config = phi3(factor)
    rules = FAMILIES["Phi3ForCausalLM"].rope
    rope = Rope.parse(config.to_dict(), 128, rules).at_length(length)
    for ours, theirs in zip(
        rope.tables(length),
        Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None]),
        strict=True,
    ):
        half = int(64 * factor)
        torch.testing.assert_close(ours, theirs[0, :, :half], rtol=0.0, atol=4096 * 2**-23)


def test_old_names_of_longrope_are_phi3s_alone():
    old = {**LONGROPE, "type": "su"}
    del old["rope_type"]
    config = {"rope_scaling": old, "max_position_embeddings": 131072}
    rope = Rope.parse(config, 128, FAMILIES["Phi3ForCausalLM"].rope)
    assert torch.equal(rope.frequencies, Rope.parse(spelled(LONGROPE, "type"), 128).frequencies)
    with pytest.raises(UnsupportedModel, match="rope_type su"):
        Rope.parse(config, 128)


def test_dynamic_rope_is_served_up_to_the_original_length_and_refused_beyond():
    rope = Rope.parse(spelled(CASES["dynamic"], "transformers 5"), 128)
    assert rope.at_length(131072) is rope
    with pytest.raises(UnsupportedModel, match=r"max_model_len 131073 is above 131072: .* dynamic"):
        rope.at_length(131073)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 31, "short_factor": []}},
            "long_factor has 31 numbers, not 32",
        ),
        ({"rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "linear has no 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_rope_that_is_not_served_is_refused_by_name(config, named):
    with pytest.raises(UnsupportedModel, match=named):
        Rope.parse({"max_position_embeddings": 512, **config}, head_dim=64)
