"""Each measurement of adapters at a tiny size: it gives figures, and ratios fit the figures."""

import json

import pytest

from bench.adapters.__main__ import EXPERIMENTS
from bench.adapters.cold_start import ColdStart
from bench.adapters.count import Count
from bench.adapters.kv_tokens import KVTokens
from bench.adapters.memory import Memory
from bench.adapters.objects import RandomObjects
from bench.adapters.shapes import LAYOUTS, TARGETS
from bench.adapters.storm import Storm
from bench.experiment import row
from tests.registry.factories import parse_canonical


def measure(experiment):
    return json.loads(row("adapters.test", experiment))["result"]


def test_random_objects_are_canonical_and_no_two_are_equal() -> None:
    objects = RandomObjects(LAYOUTS["smollm2-135m float32"].shape, 8, TARGETS["q,v"])
    (one, data), (other, _) = objects.make(1), objects.make(2)
    adapter = parse_canonical(data)
    assert adapter.rank == 8
    assert len(adapter.modules) == 60
    assert one.size_bytes == len(data) == objects.size_bytes
    assert one.digest != other.digest
    assert objects.make(1)[0] == one


def test_an_adapter_costs_what_it_has_and_a_slot_what_the_largest_has() -> None:
    result = measure(Memory())
    for layouts in result.values():
        for figures in layouts.values():
            ours = figures["ours_bytes_per_adapter"]
            assert ours >= figures["weights_bytes_per_adapter"]
            padding = 1 - figures["weights_bytes_per_adapter"] / ours
            assert figures["ours_padding_share"] == pytest.approx(padding, abs=1e-3)
            slots = figures["slot_on_targets_bytes"] / ours
            assert figures["slots_on_targets_to_ours"] == pytest.approx(slots, rel=1e-2)
    assert result["llama-3.1-8b bfloat16"]["all"]["slots_on_targets_to_ours"] > 3


def test_slots_take_kv_away_whoever_is_resident() -> None:
    result = measure(KVTokens())
    for layouts in result.values():
        for by_rank in layouts.values():
            for none, few, many in by_rank.values():
                assert none["ours"] > few["ours"] > many["ours"]
                assert none["slots"] == few["slots"] == many["slots"] < none["ours"]
                assert none["ours"] == none["slots_exactly_as_many"]


def test_a_cold_start_is_its_stages_beside_moving_the_same_bytes() -> None:
    result = measure(ColdStart(stack="tiny", rank=8, repeats=2))
    stages_ms = sum(result[stage]["ms"] for stage in ("s3_to_disk", "from_disk"))
    assert result["from_s3"]["ms"] == pytest.approx(stages_ms, rel=1e-2)
    assert result["from_host"]["ms"] > 0
    disk = result["from_disk"]
    assert disk["share_of_bandwidth"] == pytest.approx(disk["plain_ms"] / disk["ms"], rel=1e-2)
    assert result["packed_bytes"] > result["object_bytes"] > 0


def test_a_storm_loads_while_the_streams_go_on() -> None:
    small = {"steps": 40, "lead_steps": 2, "rounds": 1, "streams": 2, "prompt_tokens": 9}
    cold = {"at_once": 3, "cold": 12, "disk_holds": 5, "store_delay_s": 0.01}
    result = measure(Storm(stack="tiny", targets="all", **small, **cold))
    for kind in ("prefetches", "requests"):
        figures = result[kind]
        quotient = figures["storm"]["step_cpu_ms"] / figures["beside"]["step_cpu_ms"]
        assert figures["storm_to_beside"]["step_cpu_ms"] == pytest.approx(quotient, rel=1e-2)
        # Children of other tests in this process may be there, too.
        assert figures["children_cpu_s"].keys() >= {"lora.fetch", "bench.adapters.s3_server"}
        assert {"queued_ms", "blocked_ms"} <= figures["storm"].keys()
    assert result["prefetches"]["requests_per_step"] == 2
    assert result["quiet_spread"].keys() == {"itl_p50_ms", "itl_p99_ms", "step_cpu_ms"}


def test_many_adapters_are_compared_with_few_that_go_by_their_names() -> None:
    small = {"counts": (3, 40), "compared": 40, "resident": 6, "clients": 6, "max_num_seqs": 3}
    requests = {"prompt_tokens": (5, 9), "output_tokens": (3, 5), "requests": 24, "warm_up": 12}
    result = measure(Count(stack="tiny", repeats=1, **small, **requests))
    compared, renamed = result["zipf"]["40"], result["renamed"]
    assert (renamed["fetched"], renamed["placed"]) == (0, 0), "its names are those of pinned ones"
    assert renamed["hit_rate"] == {"device": 1.0, "host": None, "disk": None}
    assert compared["placed"] > 0
    quotient = compared["output_tokens_per_s"] / renamed["output_tokens_per_s"]
    assert result["compared_to_renamed"]["median"] == pytest.approx(quotient, rel=1e-2)
    for figures in (renamed, *result["zipf"].values(), *result["uniform"].values()):
        assert 0 < figures["distinct_adapters_per_step"] <= figures["requests_per_step"] <= 3
        assert figures["hit_rate"].keys() == {"device", "host", "disk"}
    assert result["zipf"].keys() == result["uniform"].keys() == {"3", "40"}


def test_every_experiment_measures_the_shape_of_its_claim() -> None:
    assert {e.stack for e in EXPERIMENTS.values()} == {"smollm2-135m", "tiny"}
