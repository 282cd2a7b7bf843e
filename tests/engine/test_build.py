import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from engine.__main__ import serve
from engine.build import build_core, resolve_device, resolve_max_model_len, resolve_sum_ranks
from engine.errors import UnsupportedModel
from engine.models.config import DecoderConfig
from engine.wire.encoding import write_vocabulary
from lora.beat import Beat
from lora.layout import Layout, ModelShape
from registry.formats.peft_format import MAX_ADDED_TOKENS
from server.capacity.arena import Arena, Limits, sum_ranks
from server.capacity.hardware import HARDWARE
from tests.engine.gpu import backends
from tests.engine.models.test_config import LLAMA
from tests.tiny_models import save_model

MODEL = LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": 2048}
LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128)
_HARDWARE = {"cuda": "h100-80gb", "cpu": "epyc-9r14"}


def make_config(tmp_path, **values):
    unset = ("max_model_len", "max_num_batched_tokens", "max_num_seqs")
    defaults = {"device": "auto", "dtype": "auto", "arena_bytes": 1 << 20, **dict.fromkeys(unset)}
    return backends.make_config(tmp_path, **{**defaults, **values})


def longest(tmp_path, num_tokens=160_000, asked=None, **model):
    config = make_config(tmp_path, max_model_len=asked)
    return resolve_max_model_len(
        config, DecoderConfig.parse({**MODEL, **model}), num_tokens
    ).max_model_len


def test_without_a_wish_the_model_the_limit_or_the_arena_decides(tmp_path):
    assert longest(tmp_path) == 2048
    assert longest(tmp_path, max_position_embeddings=131_072) == 8192
    assert longest(tmp_path, num_tokens=112) == 112


def test_without_a_wish_all_sequences_have_the_frequencies_of_short_ones(tmp_path):
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    longrope = {
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"rope_type": "longrope", **factors},
    }
    assert longest(tmp_path, **longrope) == 1024
    assert longest(tmp_path, asked=4096, **longrope) == 4096


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is this machine's GPU")
def test_auto_is_float32_on_the_cpu_where_there_is_no_gpu(tmp_path):
    config = resolve_device(make_config(tmp_path))
    assert (config.device, config.dtype) == ("cpu", "float32")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 128)


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_a_gpu_runs_the_checkpoints_own_16_bits(tmp_path, saved, dtype):
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = resolve_device(make_config(tmp_path, device="cuda"))
    assert config.dtype == dtype
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 2048)


def test_a_cpu_needs_no_triton(tmp_path):
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import engine.__main__, engine.gpu.backend\n"
        "assert not [name for name in sys.modules if name.startswith('kernels.gpu.')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(UnsupportedModel, match="take device cpu"):
        build_core(make_config(tmp_path, device="cuda"), "eng-1", [])


@pytest.mark.parametrize(
    ("device", "itemsize", "step_tokens", "used_share", "least", "below"),
    [
        ("cuda", 2, 2048, 1.0, 256 * 32, 1 << 14),
        ("cuda", 2, 2048, 0.25, 300, 64 * 16),
        ("cuda", 2, 700, 1.0, 64 * 16, 1 << 11),
        ("cuda", 2, 512, 1.0, 300, 64 * 16),
        ("cpu", 4, 128, 1.0, 300, 64 * 16),
    ],
)
def test_as_many_adapters_share_a_step_as_a_full_step_takes_time(
    tmp_path, device, itemsize, step_tokens, used_share, least, below
):
    layout, weight_bytes = Layout.of(LLAMA_8B, itemsize), 8_030_000_000 * itemsize
    config = make_config(tmp_path, device=device, max_num_batched_tokens=step_tokens)
    resolved = resolve_sum_ranks(config, layout, weight_bytes, used_share)
    found = resolved.max_sum_ranks_per_step
    assert found is not None
    assert least <= found < below
    limits, hardware = Limits(256, step_tokens), HARDWARE[_HARDWARE[device]]
    arena = Arena(layout, 80 << 30, weight_bytes, 0, 40 << 30, 0)
    assert sum_ranks(limits, hardware, arena, used_share) == found, "chorale plan has another rule"
    given = dataclasses.replace(config, max_sum_ranks_per_step=8)
    assert resolve_sum_ranks(given, layout, weight_bytes, used_share) == given


def test_a_small_model_gets_256_ranks_and_a_large_step_of_one_more(tmp_path):
    layout = Layout.of(LLAMA_8B, 2)
    for step_tokens, found in ((512, 256), (2048, 375)):
        config = make_config(tmp_path, device="cuda", max_num_batched_tokens=step_tokens)
        resolved = resolve_sum_ranks(config, layout, 125 * layout.bytes_per_rank, 1.0)
        assert resolved.max_sum_ranks_per_step == found


def test_what_was_given_stays(tmp_path):
    config = make_config(
        tmp_path,
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=3,
        max_num_batched_tokens=99,
        swap_bytes=0,
        host_cache_bytes=1 << 20,
    )
    assert resolve_device(config) == config
    resolved = dataclasses.replace(config, max_model_len=9, max_sum_ranks_per_step=8)
    assert resolved.scheduler.max_model_len == 9


def test_an_error_of_a_start_that_nobody_foresaw_is_said_with_the_status_of_one(tmp_path, caplog):
    model = save_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"torn")
    write_vocabulary(tmp_path / "vocabulary", [b"x"])
    config = make_config(
        tmp_path, model_dir=str(model), device="cpu", vocabulary_path=str(tmp_path / "vocabulary")
    )
    with pytest.raises(SystemExit) as ended:
        serve(config, Beat())
    assert ended.value.code == os.EX_DATAERR
    assert "the model cannot be started: SafetensorError: " in caplog.messages[-1]


def test_tokens_that_adapters_add_have_a_place_among_the_words_and_no_text(tmp_path):
    model_dir = str(save_model(tmp_path / "model"))
    config = make_config(tmp_path, model_dir=model_dir, device="cpu")
    core, _ = build_core(config, "eng-1", [b"x"] * 290)
    words = core.scheduler.outputs._vocabulary
    assert words == [b"x"] * 290 + [b""] * (2 + MAX_ADDED_TOKENS)


def test_words_of_tokens_that_the_model_does_not_have_are_left_out(tmp_path):
    """Masks are as long as there are words, and a device takes those of the model's length."""
    model_dir = str(save_model(tmp_path / "model"))
    config = make_config(tmp_path, model_dir=model_dir, device="cpu")
    core, _ = build_core(config, "eng-1", [b"x"] * (999 + MAX_ADDED_TOKENS))
    assert len(core.scheduler.outputs._vocabulary) == 292 + MAX_ADDED_TOKENS
