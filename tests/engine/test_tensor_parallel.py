"""Engines of several ranks answer as those of one; models that cannot be cut are refused."""

import pytest

from engine.build import build_core as build_engine
from engine.build import resolve_device
from engine.errors import UnsupportedModel
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.gpu.backends import make_config
from tests.engine.real_core import add_adapter, build_core
from tests.tiny_models import save_adapter, save_model

SPECS = {
    "pattern": {"r": 5, "rank_pattern": {"v_proj": 19, "down_proj": 9, "gate_proj": 1}},
    "sums": {"r": 3, "target_modules": ["o_proj", "down_proj"]},
    "activated": {"alora_invocation_tokens": [17, 18, 19]},
}


def prompt_of(number):
    return [*[(11 * i * i + 5 * number) % 250 + 1 for i in range(7 * number + 1)], 17, 18, 19, 40]


def test_four_ranks_answer_as_one(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model_dir = save_model(tmp_path / "model", attention_bias=True, mlp_bias=True, **heads)
    objects, refs = {}, [None]
    for seed, (name, spec) in enumerate(SPECS.items()):
        adapter = save_adapter(model_dir, tmp_path / name, seed=seed, **spec)
        refs.append(add_adapter(objects, model_dir, adapter, tmp_path))
    # The sizes of four ranks are so small that requests are preempted and adapters evicted.
    tight = {"num_ranks": 4, "num_slabs": 30, "budget": 24, "num_swap_slots": 40}
    answers = []
    for sizes in ({}, tight):
        core = build_core(
            model_dir, tmp_path / f"engine{len(sizes)}", objects,
            make_kernels=kernels_of("native"), **sizes,
        )  # fmt: skip
        for i in range(12):
            options = {"adapter": refs[i % 4], "grammar": ("", "quick")[i // 4 % 2]}
            core.handle("gw", make_message(f"r{i}", prompt=prompt_of(i), max_tokens=8, **options))
        outputs = run_until_idle(core)
        answers.append({request_id: tokens_of(answer) for request_id, answer in outputs.items()})
    assert answers[0] == answers[1]
    stats = core.take_stats()
    assert stats.adapter_evictions + stats.prefix_evictions > 0
    device = next(tier for tier in stats.tiers if tier.tier == "device")
    whole = core.scheduler.layout.kv_bytes_per_token * core.scheduler.layout.block_size
    assert device.limit_bytes == tight["num_slabs"] * whole, "of all ranks in total"


def test_a_model_that_cannot_be_cut_is_refused_before_any_process_is_started(tmp_path):
    model_dir = save_model(tmp_path / "model")
    config = make_config(
        device="cpu", model_dir=str(model_dir), data_dir=str(tmp_path), tensor_parallel_size=4
    )
    with pytest.raises(UnsupportedModel, match="num_key_value_heads of 2"):
        build_engine(resolve_device(config), "eng-1", [])
    assert not (tmp_path / "ranks").exists()
