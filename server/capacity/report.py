"""A plan as JSON; the command line prints the same figures as text."""

import math
from typing import Any

from server.capacity.engine_plan import EnginePlan, Load
from server.capacity.hardware import BYTES_SHARE, FLOPS_SHARE
from server.capacity.plan import Fleet, Plan
from server.capacity.replay import Replayed
from server.text.json_object import JsonObject


def describe(plan: Plan) -> JsonObject:
    """All figures of a plan. Sizes are in bytes, times in milliseconds, money in dollars."""
    wish, engine = plan.wish, plan.fleet.engine
    return {
        "model": _model(engine),
        "hardware": _hardware(engine),
        "traffic": {
            "prompt_tokens": str(wish.traffic.prompt_tokens),
            "output_tokens": str(wish.traffic.output_tokens),
            "adapters": wish.traffic.num_adapters,
            "ranks": list(wish.traffic.ranks) if wish.traffic.num_adapters else [],
            "popularity": wish.traffic.popularity,
            "objective_ms": {
                "ttft_p95": _ms(wish.objective.ttft_s), "tpot_p95": _ms(wish.objective.tpot_s)
            },
        },
        "memory": _memory(engine, wish.loads[-1]),
        "one_engine": _answers(plan),
        "engine": _fleet(plan.fleet),
        "tensor_parallel": [_fleet(fleet) for fleet in plan.tried],
        "costs": {"utilization": wish.utilization,
                  "by_quantization": [_fleet(fleet) for fleet in plan.costs]},
        "breaks_first": {
            "what": plan.verdict.what,
            "at": _load(plan.verdict.load),
            "change": plan.verdict.change,
        },
    }  # fmt: skip


def _model(engine: EnginePlan) -> JsonObject:
    sizes, layout = engine.sizes, engine.arena.layout
    s, itemsize = sizes.shape, layout.kv_itemsize
    return {
        "name": sizes.name,
        "parameters": sizes.num_parameters,
        "quantization": engine.quantization,
        "weight_bytes": sizes.weight_bytes(engine.quantization, engine.hardware.itemsize),
        "layers": s.num_layers,
        "heads": s.num_heads,
        "kv_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "kv_itemsize": itemsize,
        "kv_bytes_per_token": 2 * s.num_layers * s.num_kv_heads * s.head_dim * itemsize,
        "kv_bytes_per_token_without_gqa": 2 * s.num_layers * s.num_heads * s.head_dim * itemsize,
    }


def _hardware(engine: EnginePlan) -> JsonObject:
    hardware, is_measured = engine.hardware, engine.hardware.name == "this machine"
    return {
        "name": hardware.name,
        "memory_bytes": hardware.memory_bytes,
        "bytes_per_s": hardware.bytes_per_s,
        "flops_per_s": hardware.flops_per_s,
        "usd_per_hour": hardware.usd_per_hour,
        "share_of_bytes_per_s": None if is_measured else BYTES_SHARE,
        "share_of_flops_per_s": None if is_measured else FLOPS_SHARE,
    }


def _memory(engine: EnginePlan, load: Load) -> JsonObject:
    """Memory of one rank, and of its share of the requests."""
    arena, traffic = engine.arena, engine.traffic
    layout = arena.layout
    at_once = load.users or engine.most_requests_of(traffic.longest)
    kv = at_once * layout.num_blocks(traffic.longest) * layout.slab_bytes
    return {
        "ranks": layout.num_shards,
        "device_bytes": arena.memory_bytes,
        "weight_bytes": arena.weight_bytes,
        "step_bytes": arena.step_bytes,
        "arena_bytes": arena.num_slabs * layout.slab_bytes,
        "slab_bytes": layout.slab_bytes,
        "slabs": arena.num_slabs,
        "block_tokens": layout.block_size,
        "kv_tokens": arena.num_slabs * layout.block_size,
        "adapter_slabs": arena.adapter_slabs,
        "adapter_bytes": arena.adapter_slabs * layout.slab_bytes,
        "adapters_that_fit": arena.num_slabs // arena.adapter_slabs if arena.adapter_slabs else 0,
        "longest_tokens": traffic.longest,
        "most_requests": engine.most_requests_of(traffic.longest),
        "most_requests_in_arena": arena.most_requests(traffic.longest, traffic.num_adapters),
        "requests": at_once,
        "requests_kv_bytes": kv,
        "left_bytes": arena.memory_bytes - arena.weight_bytes - kv,
    }


def _fleet(fleet: Fleet) -> JsonObject:
    engine = fleet.engine
    return {
        "quantization": engine.quantization,
        "tensor_parallel_size": engine.num_shards,
        "fits": engine.fits,
        "most_requests": engine.most_requests_of(engine.traffic.longest) if engine.fits else 0,
        "capacity": _load(fleet.capacity),
        "at_capacity": _replayed(fleet.at_capacity) if fleet.at_capacity else None,
        "engines": fleet.num_engines,
        "usd_per_hour": _money(fleet.num_engines and fleet.num_engines * fleet.usd_per_hour),
        "usd_per_million_output_tokens": _money(fleet.usd_per_million),
    }


def _answers(plan: Plan) -> list[JsonObject]:
    broken_by = plan.wish.objective.broken_by
    return [
        {**(_load(load) or {}), **_replayed(replayed), "breaks": broken_by(replayed)}
        for load, replayed in zip(plan.wish.loads, plan.replayed, strict=False)
    ]


def _replayed(replayed: Replayed) -> JsonObject:
    return {
        "ttft_ms_p50": _ms(replayed.ttft_s(0.5)),
        "ttft_ms_p95": _ms(replayed.ttft_s(0.95)),
        "tpot_ms_p50": _ms(replayed.tpot_s(0.5)),
        "tpot_ms_p95": _ms(replayed.tpot_s(0.95)),
        "output_tokens_per_s": _rounded(replayed.output_tokens_per_s),
        "prompt_tokens_per_s": _rounded(replayed.prompt_tokens_per_s),
        "most_at_once": replayed.most_running,
        "preemptions": replayed.num_preemptions,
    }


def _load(load: Load | None) -> JsonObject | None:
    if load is None:
        return None
    return {"users": load.users} if load.rate is None else {"rate": _rounded(load.rate)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _rounded(1000 * seconds)


def _money(usd: float | None) -> float | None:
    return round(usd, 4) if usd else None


def _rounded(value: float) -> Any:
    """Three significant digits."""
    if not value or not math.isfinite(value):
        return value
    return float(f"{value:.3g}")
