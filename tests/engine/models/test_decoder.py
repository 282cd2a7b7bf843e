"""The decoder alone: its precision by dtype next to transformers', and refused checkpoints."""

import json
from itertools import product

import pytest
import torch

from engine.cpu.inputs import InputBuilder
from engine.errors import UnsupportedModel
from engine.models.checkpoint import Checkpoint
from engine.models.config import DecoderConfig
from engine.models.weights import StoredWeights, load_config, open_weights
from engine.steps.batch import Batch, ScheduledRow
from engine.wire.messages import SamplingParams
from kernels.cpu.plain import CpuKernels
from kernels.quantized import QuantizedWeight
from lora.layout import Layout
from lora.packed import PackedForm
from tests.cpu_decoder import make_decoder
from tests.quantized_models import save_quantized
from tests.tiny_models import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    MIXTRAL,
    MROPE,
    NEWER_NAMES,
    OLMO2,
    PHI3,
    QWEN3_MOE,
    load_model,
    rename_tensors,
    save_model,
)

CPU = torch.device("cpu")
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "granite": GRANITE,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": OLMO2,
    "qwen3_moe": {"head_dim": 32, **QWEN3_MOE},
    "mixtral": MIXTRAL,
}
PROMPT = [(7 * i * i + 3) % 250 for i in range(53)]


def load(model_dir, dtype=torch.float32):
    config = DecoderConfig.parse(load_config(model_dir))
    return make_decoder(config, dict(StoredWeights(model_dir, dtype)), form_of(config, dtype), 128)


def form_of(config, dtype=torch.float32):
    layout = Layout.of(config.shape, dtype.itemsize)
    return PackedForm(layout, str(dtype).removeprefix("torch."), "base-1")


def arena_of(form):
    return torch.zeros(8, form.layout.slab_bytes, dtype=torch.uint8)


def step(tokens, start):
    """A step of one request on the base model, which samples."""
    sampling = SamplingParams(max_tokens=1)
    row = ScheduledRow("r", tuple(tokens), start, (5, 2, 7, 1), None, None, 0, sampling, 0, 0)
    return Batch(1, (row,))


@torch.inference_mode()
def last_logits(model, dtype):
    """Logits of the prompt's last token: from one step of the prompt, then from a decode."""
    form = form_of(model.config, dtype)
    builder = InputBuilder(arena_of(form), form, lambda key: (0, None))
    steps = (step(PROMPT[start:], start) for start in (0, len(PROMPT) - 1))
    return torch.stack([model.forward(builder.build(batch))[0][0] for batch in steps]).float()


class OneIsNotFinite(CpuKernels):
    """Kernels whose attention returns NaN for one token in one layer."""

    def __init__(self, shape, layer, token):
        super().__init__(shape)
        self.place = layer, token

    def attention(self, qkv, layer, work, norms=None, window=None, rope=0):
        out = super().attention(qkv, layer, work, norms, window, rope)
        if layer == self.place[0]:
            out[self.place[1]] = torch.nan
        return out


@pytest.mark.parametrize(("layer", "token"), [(0, 3), (1, 3), (1, len(PROMPT) - 1)])
@torch.inference_mode()
def test_a_token_that_is_not_finite_is_told_in_any_layer_whether_it_samples_or_not(
    qwen3, layer, token
):
    config = DecoderConfig.parse(load_config(qwen3))
    assert config.shape.num_layers == 2
    form = form_of(config)
    model = make_decoder(
        config, StoredWeights(qwen3, torch.float32), form, 128,
        lambda shape: OneIsNotFinite(shape, layer, token),
    )  # fmt: skip
    inputs = InputBuilder(arena_of(form), form, lambda key: (0, None)).build(step(PROMPT, 0))
    _, finite = model.forward(inputs)
    assert finite.tolist() == [i != token for i in range(len(PROMPT))]


@torch.inference_mode()
def reference_logits(model_dir, dtype):
    model = load_model(model_dir, dtype)
    return model(torch.tensor([PROMPT])).logits[0, -1].float()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *product(FAMILIES, (torch.float32, torch.bfloat16)),
        # Where a conversion is forgotten, it is forgotten for all 16-bit types.
        *product(("llama", "gemma2"), (torch.float16,)),
    ],
)
def test_a_dtype_loses_no_more_than_twice_what_transformers_loses(tmp_path, family, dtype):
    model_dir = save_model(tmp_path / "model", family=family, dtype=dtype, **FAMILIES[family])
    expected = reference_logits(model_dir, torch.float32)
    loss = (reference_logits(model_dir, dtype) - expected).abs().max()
    ours = last_logits(load(model_dir, dtype), dtype)
    rounding = 64 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (ours - expected).abs().max() <= 2 * loss + rounding


def say_nothing_of_ties(config):
    """Remove what releases of Gemma 3 do not have."""
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]


def say_tied(config):
    """Say what transformers 5 takes Mistral Small 3.1 to say, whose head is not tied."""
    config["tie_word_embeddings"] = True


def flatten(config):
    """Write a config of Qwen2.5-VL as transformers did before 4.52."""
    text = config.pop("text_config")
    del text["model_type"], text["layer_types"]
    rope = text.pop("rope_parameters")
    section = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config |= {**text, "rope_theta": rope["rope_theta"], "rope_scaling": section, **config}


@pytest.mark.parametrize("names", [{}, NEWER_NAMES], ids=["as saved", "newer"])
@pytest.mark.parametrize(
    ("family", "options", "change"),
    [
        ("gemma3", GEMMA3, say_nothing_of_ties),
        ("mistral3", {"sliding_window": 24}, None),
        ("mistral3", {"tied": False}, say_tied),
        ("qwen2_5_vl", {"tied": False, "rope": MROPE}, None),
        ("qwen2_5_vl", {"rope": MROPE}, flatten),
        ("qwen3_vl", {"head_dim": 32, "tied": False, "rope": MROPE}, None),
        ("llava", {"tied": False}, None),
    ],
)
def test_a_checkpoint_that_also_takes_images_computes_as_its_text_model(
    tmp_path, family, options, change, names
):
    model_dir = save_model(tmp_path / "model", family=family, **options)
    rename_tensors(model_dir, names if family != "qwen3_vl" else {})
    if change:
        config = json.loads((model_dir / "config.json").read_text())
        change(config)
        (model_dir / "config.json").write_text(json.dumps(config))
    expected = reference_logits(model_dir, torch.float32)
    ours = last_logits(load(model_dir), torch.float32)
    assert (ours - expected).abs().max() <= 64 * torch.finfo(
        torch.float32
    ).eps * expected.abs().max()


@torch.inference_mode()
def test_quantised_experts_compute_with_the_numbers_that_their_codes_mean(tmp_path):
    options = {**QWEN3_MOE, "moe_intermediate_size": 64, "intermediate_size": 192}
    whole = save_model(tmp_path / "model", family="qwen3_moe", **options)
    folder, twin = save_quantized(whole, tmp_path, "W4A16")
    weights, config = open_weights(folder, torch.float32), DecoderConfig.parse(load_config(folder))
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    assert isinstance(weights[name], QuantizedWeight)
    ours = last_logits(make_decoder(config, weights, form_of(config), 128), torch.float32)
    expected = reference_logits(twin, torch.float32)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return save_model(folder / "model", family="qwen3", tied=False, attention_bias=True)


@pytest.fixture
def checkpoint(qwen3):
    """Config and weights of a Qwen3, the family with the most kinds of tensors."""
    config = DecoderConfig.parse(load_config(qwen3))
    return config, dict(StoredWeights(qwen3, torch.float32))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(checkpoint, name):
    config, weights = checkpoint
    tensor = weights.pop(name)
    with pytest.raises(UnsupportedModel, match=f"no tensor {name}"):
        make_decoder(config, weights, form_of(config), 64)
    with pytest.raises(UnsupportedModel, match=f"tensor {name} is .* by config.json"):
        make_decoder(config, weights | {name: tensor[1:]}, form_of(config), 64)


@pytest.mark.parametrize("scale", [torch.ones(3), torch.tensor(0.0)])
def test_a_scale_of_kv_that_is_not_one_positive_number_is_refused(checkpoint, scale):
    config, weights = checkpoint
    name = "model.layers.1.self_attn.k_proj.output_scale"
    with pytest.raises(UnsupportedModel, match=f"tensor {name} is not one positive number"):
        list(Checkpoint(config, weights | {name: scale}).layers())


def test_an_expert_that_is_missing_or_too_many_is_named(tmp_path):
    model_dir = save_model(tmp_path / "model", family="mixtral", **MIXTRAL)
    config = DecoderConfig.parse(load_config(model_dir))
    weights = dict(StoredWeights(model_dir, torch.float32))
    last, one_more = (f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in (4, 5))
    with pytest.raises(UnsupportedModel, match=f"tensor {one_more} has no place"):
        make_decoder(config, weights | {one_more: weights[last]}, form_of(config), 64)
    del weights[last]
    with pytest.raises(UnsupportedModel, match=f"no tensor {last}"):
        make_decoder(config, weights, form_of(config), 64)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.2.input_layernorm.weight",
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(checkpoint, name):
    config, weights = checkpoint
    with pytest.raises(UnsupportedModel, match=f"tensor {name} has no place"):
        make_decoder(config, weights | {name: torch.ones(160)}, form_of(config), 64)


def test_old_checkpoints_may_carry_their_frequencies_and_a_tied_head(tmp_path):
    model_dir = save_model(tmp_path / "model")
    config = DecoderConfig.parse(load_config(model_dir))
    weights = dict(StoredWeights(model_dir, torch.float32))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["lm_head.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    checkpoint = Checkpoint(config, weights)
    assert checkpoint.lm_head is checkpoint.embedding
