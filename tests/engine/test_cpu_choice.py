"""The kernels that an engine on a CPU chooses, faults that its self-check finds, and refusals."""

import dataclasses

import pytest
import torch

from engine.build import build_core
from engine.cpu.choice import choose_kernels
from engine.cpu.decoder import attention_shape
from engine.cpu.self_check import check_kernels
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from kernels.cpu.errors import Unavailable
from kernels.cpu.native import NativeKernels
from kernels.cpu.plain import CpuKernels
from kernels.quantized import Rounding
from tests.engine.gpu.backends import make_config
from tests.engine.models import test_config
from tests.tiny_models import GEMMA2, GRANITE, save_model

LLAMA = test_config.LLAMA | {"num_hidden_layers": 3, "vocab_size": 300}
FAMILIES = {
    "llama": LLAMA,
    # Its hidden size, unlike the others', is not the size of the self-check's vocabulary.
    "one kv head": LLAMA
    | {"hidden_size": 96, "num_key_value_heads": 1, "head_dim": 48, "attention_bias": True},
    "qwen2": LLAMA
    | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "gemma2": LLAMA | GEMMA2 | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16},
    "gemma3": LLAMA
    | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "rope_parameters": None},
    "phi3": LLAMA | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5},
    "olmo2": LLAMA | {"architectures": ["Olmo2ForCausalLM"]},
    "granite": LLAMA | GRANITE | {"architectures": ["GraniteForCausalLM"]},
    "qwen3_moe": LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 48},
}


def parse(config=LLAMA, max_model_len=256):
    model_config = DecoderConfig.parse(config)
    return model_config, attention_shape(model_config, 16, max_model_len, torch.float32)


def choose(make=NativeKernels, config=LLAMA, max_model_len=256, rounding=None, **values):
    config, parsed = make_config(device="cpu", **values), parse(config, max_model_len)
    return choose_kernels(config, *parsed, make, rounding)


def check(kernels, config=LLAMA, is_invariant=False):
    model_config, shape = parse(config)
    reference = CpuKernels(shape)
    check_kernels(
        kernels(shape), reference, model_config, shape, tolerance=1e-3, is_invariant=is_invariant
    )


# ---- the choice ----


def missing(shape, threads):
    raise Unavailable("there is no C compiler")


class Uneven(CpuKernels):
    """Stands for compiled kernels whose bits depend on the number of rows."""

    name = "uneven"

    def __init__(self, shape, threads=1):
        super().__init__(shape)


class Wrong(Uneven):
    def gated(self, gate_up, activation):
        return super().gated(gate_up.flip(1), activation)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (missing, "there is no C compiler"),
        (Wrong, "the self-check failed: its logits are not torch's"),
    ],
)
def test_without_compiled_kernels_torch_computes_and_the_log_says_why_and_what_to_do(
    make, reason, caplog
):
    assert choose(make).name == "torch"
    (record,) = caplog.records
    assert (record.levelname, record.message) == (
        "WARNING",
        "CPU kernels: torch, at half the speed of those in C or less, because "
        f"{reason}. Install gcc, or Chorale from a wheel that was built for this processor",
    )


def test_one_that_was_named_is_not_replaced_by_another():
    with pytest.raises(UnsupportedModel, match="no kernels in C for this CPU: there is no C comp"):
        choose(missing, cpu_kernels="native")
    assert choose(cpu_kernels="torch").name == "torch"


@pytest.mark.parametrize(
    ("make", "values", "reason"),
    [
        (missing, {}, "there is no C compiler"),
        (Uneven, {}, "the self-check failed: a token's bits depend on who is beside it"),
        (Uneven, {"max_model_len": 16}, "the self-check failed: a token's bits depend"),
        (NativeKernels, {"cpu_kernels": "torch"}, "cpu_kernels is torch"),
    ],
)
def test_batch_invariance_is_refused_where_the_compiled_kernels_do_not_give_it(
    make, values, reason
):
    match = f"no kernels in C for this CPU, which batch_invariant needs: {reason}"
    with pytest.raises(UnsupportedModel, match=match):
        choose(make, batch_invariant=True, **values)


@pytest.mark.parametrize("rounding", [None, Rounding(8)], ids=["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_there_is_here_passes(family, rounding):
    try:
        made = NativeKernels(parse()[1], 1)
    except Unavailable as reason:
        pytest.skip(str(reason))
    chosen = choose(config=FAMILIES[family], rounding=rounding, batch_invariant=True)
    assert chosen.name == made.name


def test_groups_that_do_not_divide_the_inputs_do_not_end_the_start():
    """SmolLM2 has 576 inputs, which are no multiple of 128."""
    chosen = [choose(rounding=rounding).name for rounding in (Rounding(4, 128), Rounding(8))]
    assert chosen[0] == chosen[1]


# ---- the self-check ----


class NoAdapters(CpuKernels):
    def add_lora(self, y, x, site, runs):
        pass


class OneTile(CpuKernels):
    def add_lora(self, y, x, site, runs):
        tables = tuple(table[..., :1] for table in runs.tile_tables)
        super().add_lora(y, x, site, dataclasses.replace(runs, tile_tables=tables))


class EverybodysAdapter(CpuKernels):
    def add_lora(self, y, x, site, runs):
        bounds = torch.tensor([[0, len(x)]], dtype=torch.int32)
        super().add_lora(y, x, site, dataclasses.replace(runs, bounds=bounds))


class NoHeadNorms(CpuKernels):
    def attention(self, qkv, layer, work, norms=None, window=None, rope=0):
        return super().attention(qkv, layer, work, None, window, rope)


class NoLayerNorms(CpuKernels):
    def rms_norm(self, x, weight, eps, delta=None):
        return x if delta is None else super().rms_norm(x, weight, eps, delta)


class NoSoftCap(CpuKernels):
    def __init__(self, shape):
        super().__init__(dataclasses.replace(shape, softcap=None))


class OneRope(CpuKernels):
    def attention(self, qkv, layer, work, norms=None, window=None, rope=0):
        return super().attention(qkv, layer, work, norms, window)


class OneActivation(CpuKernels):
    def gated(self, gate_up, activation):
        return super().gated(gate_up, "silu")


class WholeHeads(CpuKernels):
    """Kernels that rotate the whole of a head."""

    def __init__(self, shape):
        cos, sin = (table.repeat(1, 1, 2) for table in (shape.cos, shape.sin))
        super().__init__(dataclasses.replace(shape, cos=cos, sin=sin))


class NoWindow(CpuKernels):
    def attention(self, qkv, layer, work, norms=None, window=None, rope=0):
        return super().attention(qkv, layer, work, norms, None, rope)


class NoScale(CpuKernels):
    def __init__(self, shape):
        super().__init__(dataclasses.replace(shape, scale=None))


class NaN(CpuKernels):
    def rms_norm(self, x, weight, eps, delta=None):
        return super().rms_norm(x, weight, eps, delta) * torch.nan


class NoBias(CpuKernels):
    def linear(self, weight, bias):
        return super().linear(weight, None)


@pytest.mark.parametrize(
    ("kernels", "family"),
    [
        (Wrong, "llama"),
        (NoAdapters, "llama"),
        (OneTile, "llama"),
        (EverybodysAdapter, "llama"),
        (NaN, "llama"),
        (NoHeadNorms, "qwen3"),
        (NoWindow, "qwen2"),
        (NoScale, "granite"),
        (NoLayerNorms, "olmo2"),
        (WholeHeads, "phi3"),
        (NoSoftCap, "gemma2"),
        (OneActivation, "gemma2"),
        (OneRope, "gemma3"),
        (NoBias, "one kv head"),
    ],
)
def test_the_self_check_finds_what_is_wrong(kernels, family):
    check(CpuKernels, FAMILIES[family])
    with pytest.raises(Unavailable, match="its logits are not torch's"):
        check(kernels, FAMILIES[family])


def but(*names):
    """Kernels in C with some operations of torch, whose bits depend on the number of rows."""

    def make(shape):
        kernels, plain = NativeKernels(shape, 1), CpuKernels(shape)
        for name in names:
            setattr(kernels, name, getattr(plain, name))
        return kernels

    return make


@pytest.mark.parametrize("name", ["linear", "add_lora", "attention"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_self_check_finds_what_is_not_invariant(name, family):
    check(but(name), FAMILIES[family])
    check(but(), FAMILIES[family], is_invariant=True)
    with pytest.raises(Unavailable, match="depend on who is beside it"):
        check(but(name), FAMILIES[family], is_invariant=True)


# ---- refusals before anything is loaded ----


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"device": "cuda", "batch_invariant": True}, "batch_invariant is for CPUs"),
        ({"device": "cpu", "quantization": "fp8"}, "take quantization int8"),
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, "leave out kv_cache_dtype"),
        (
            {"device": "cpu", "dtype": "bfloat16", "batch_invariant": True},
            "batch_invariant on a CPU wants dtype float32: in bfloat16",
        ),
        (
            {"device": "cpu", "dtype": "float16", "quantization": "int8"},
            "quantization int8 on a CPU wants dtype float32",
        ),
        (
            {"device": "cpu", "dtype": "bfloat16", "cpu_kernels": "native"},
            "cpu_kernels native on a CPU wants dtype float32",
        ),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_with_the_reason(tmp_path, values, refusal):
    model_dir = save_model(tmp_path / "model")
    config = make_config(tmp_path, model_dir=str(model_dir), arena_bytes=1 << 20, **values)
    with pytest.raises(UnsupportedModel, match=refusal):
        build_core(config, "eng-1", [])
