"""Sizes are those of config.json, and bytes those that the engine's layout has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora.layout import Layout, ModelShape
from server.capacity.arena import default_limits, make_arena
from server.capacity.hardware import HARDWARE
from server.capacity.sizes import (
    NAMED_MODELS,
    ModelSizes,
    UnknownModel,
    change_sizes,
    find_sizes,
    parse_sizes,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip
"""The config.json of the model on the Hub, as far as it has sizes."""


def test_of_a_model_that_also_takes_images_the_text_model_is_planned() -> None:
    sizes = parse_sizes(GEMMA_3_4B, "gemma")
    assert sizes.shape == ModelShape(34, 2560, 10_240, 8, 4, 256)
    assert (sizes.vocab_size, sizes.max_model_len, sizes.is_tied) == (262_208, 131_072, True)


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    """Untied models, whose widths are multiples of 32 of at least 64."""
    widths = st.integers(2, 400).map(lambda n: 32 * n)
    kv_heads = draw(st.integers(1, 8))
    shape = ModelShape(
        draw(st.integers(1, 90)), draw(widths), draw(widths), kv_heads * draw(st.integers(1, 8)),
        kv_heads, draw(st.sampled_from((64, 128))),
    )  # fmt: skip
    return ModelSizes("any", shape, draw(st.integers(2, 50_000)), 4096)


@given(models(), st.sampled_from((2, 4)))
def test_fewer_bits_never_need_more_memory(model: ModelSizes, itemsize: int) -> None:
    forms = ("int4", "int8", "float")
    products = [model.product_bytes(form, itemsize) for form in forms]
    assert products == sorted(products)
    weights = [model.weight_bytes(form, itemsize) for form in forms]
    assert weights == sorted(weights)


@given(models(), st.sampled_from(sorted(HARDWARE)))
def test_kv_of_a_token_is_the_formula_of_the_books(model: ModelSizes, name: str) -> None:
    hardware = HARDWARE[name]
    arena = make_arena(model, hardware, "float", 1, default_limits(hardware.kind), 0)
    s, layout = model.shape, arena.layout
    of_token = 2 * s.num_layers * s.num_kv_heads * s.head_dim * hardware.itemsize
    assert layout.kv_block_elems * layout.kv_itemsize == of_token * layout.block_size
    assert layout.kv_bytes_per_token * layout.block_size - of_token * layout.block_size < 256


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 400))
def test_the_requests_that_fit_take_no_more_slabs_than_there_are(
    rank: int, num_adapters: int, num_tokens: int
) -> None:
    limits = replace(default_limits("cpu"), arena_bytes=3 << 20)
    model = parse_sizes(LLAMA, "tiny")
    rank *= bool(num_adapters)
    arena = make_arena(model, HARDWARE["epyc-9r14"], "float", 1, limits, rank)
    blocks = arena.layout.num_blocks(num_tokens)
    found = arena.most_requests(num_tokens, num_adapters)
    taken, one_more = (
        count * blocks + min(count, num_adapters) * arena.adapter_slabs
        for count in (found, found + 1)
    )
    assert taken <= arena.num_slabs < one_more


@given(models())
def test_ranks_have_no_less_together_than_one_alone(model: ModelSizes) -> None:
    for count in model.shards():
        alone, each = (model.weight_bytes("float", 2, n) for n in (1, count))
        assert alone <= count * each + model.shape.num_layers * count
        layout = Layout.of(model.shape, 2, num_shards=count)
        assert layout.kv_bytes_per_token >= 2 * 2 * model.shape.num_layers


@pytest.mark.parametrize(("name", "billions"), [
    ("llama-2-7b", 6.74), ("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("mistral-7b", 7.24),
    ("qwen2.5-7b", 7.62), ("smollm2-135m", 0.1345),
])  # fmt: skip
def test_a_named_model_has_as_many_parameters_as_published(name: str, billions: float) -> None:
    assert find_sizes(name).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert name in NAMED_MODELS


def test_sizes_are_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = find_sizes(str(tmp_path))
    assert found == find_sizes(str(tmp_path / "config.json"))
    assert found.shape == ModelShape(3, 64, 160, 4, 2, 16)
    assert (found.vocab_size, found.max_model_len, found.is_tied) == (320, 512, False)


def test_experts_count_with_their_own_width() -> None:
    config = LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 48, "head_dim": 16,
    }  # fmt: skip
    found = parse_sizes(config, "moe")
    assert (found.num_experts, found.experts_per_token) == (8, 3)
    assert found.used_share == 3 / 8
    assert found.layer_weights - found.attention_weights == 8 * 3 * 64 * 48
    assert found.adapted_shape.intermediate_size == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["Bert"]}, "its architecture is"),
        ({"hidden_size": None}, "hidden_size is None; it must be a positive integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_a_config_without_sizes_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UnknownModel, match=told):
        parse_sizes(LLAMA | change, "m")


def test_sizes_by_hand_replace_those_of_a_model() -> None:
    changed = change_sizes(find_sizes("llama-3-70b"), "kv_heads=64,vocab=7")
    assert (changed.shape.num_kv_heads, changed.vocab_size) == (64, 7)
    with pytest.raises(UnknownModel, match="'wings=2' is no size"):
        change_sizes(changed, "wings=2")
    with pytest.raises(UnknownModel, match="give hidden, intermediate"):
        change_sizes(None, "layers=2")
