"""RoPE frequencies equal those that transformers derives from the same config.json."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import UnsupportedModel
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
def test_frequencies_and_attention_factor_are_those_of_transformers(case, how):
    reference = theirs(CASES[case])
    rope = Rope.parse(spelled(CASES[case], how), head_dim=128)
    torch.testing.assert_close(rope.frequencies, reference.inv_freq, rtol=1e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_tables_are_those_of_transformers(case):
    cos, sin = Rope.parse(spelled(CASES[case], "transformers 5"), head_dim=128).tables(4096)
    expected = theirs(CASES[case])(torch.zeros(1), torch.arange(4096)[None])
    for ours, both_halves in zip((cos, sin), expected, strict=True):
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


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic .* sequence's length"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "longrope .* length"),
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
