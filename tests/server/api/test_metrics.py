"""The gateway's metrics, as they are in the text that it answers."""

import dataclasses
import subprocess
import time
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from engine.wire.messages import (
    DraftStats,
    EngineStats,
    GrammarStats,
    RequestOutput,
    TierStats,
    Timings,
)
from registry.uploads.proof import Proof
from server.api.metrics import Metrics
from server.database.clock import now_ms
from server.pool.engines import EngineFigures
from server.pool.running import Running, RunningRequest
from tests import needs
from tests.server.bases import figures_only

TIERS = tuple(
    TierStats(
        tier=tier, hits=10 * i, misses=i, loads=i + 2, load_bytes=1 << (20 + i),
        load_seconds=i + 0.25, used_bytes=4096 * i, limit_bytes=8192 * i,
    )
    for i, tier in enumerate(("device", "host", "disk", "store"), start=1)
)  # fmt: skip


NO_FIGURES = {"tiers", "grammars", "drafts", "step_seconds", "is_leaving", "silence_s"}
STEP_SECONDS = (("schedule", 0.25), ("compute", 4.0))


def make_stats(**figures: object) -> EngineStats:
    names = [f.name for f in dataclasses.fields(EngineStats) if f.name not in NO_FIGURES]
    given = {"tiers": TIERS, "step_seconds": STEP_SECONDS} | figures
    return EngineStats(**dict.fromkeys(names, 3) | given)


def note_request(
    metrics: Metrics,
    *,
    outcome: str = "stop",
    timings: Timings | None = Timings(0.75, "disk", 0.25, 0.125, 1.5),
) -> None:
    """Note a request with three tokens, the last two of which came at once."""
    base = SimpleNamespace(model_id="base")
    ticket: Any = SimpleNamespace(base=base, tenant_id="ten_1", arrived_at=time.monotonic())
    last = RequestOutput("r", 1, num_prompt_tokens=7, num_completion_tokens=3, timings=timings)
    metrics.of_requests.note_first_token(ticket, 0.3)
    metrics.of_requests.histogram("inter_token_latency", "base").observe(0.5, 2)
    metrics.of_requests.note_end(ticket, outcome, last, 11)


def samples_of(metrics: Metrics) -> dict[str, float]:
    """Values by name and labels, as in the text."""
    lines = metrics.render().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    found = {series: float(value) for series, value in pairs}
    assert len(found) == len(pairs), "a series is there twice"
    return found


def make_metrics(*, aliases: Literal["", "vllm"] = "", **stats: object) -> Metrics:
    """The metrics of a gateway with one engine, and a request for an adapter under way there."""
    welcome: Any = SimpleNamespace(max_num_seqs=64)
    engine = EngineFigures("engine", "ready", welcome, make_stats(**stats), 0)
    bases = figures_only(engine)
    requests = [
        RunningRequest("r1", "t", 1, 9, is_cold=False, engine="engine", adapter="poet", begun={0}),
        RunningRequest("r2", "t", 1, 9, is_cold=True, engine="engine", adapter="judge@2"),
        RunningRequest("r3", "t", 1, 9, is_cold=False, engine="engine"),
    ]
    bases.current[0].running = Running()
    for request in requests:
        bases.current[0].running.add(request)
    bases.current[0].engines = SimpleNamespace(figures=lambda: [engine])
    lag = SimpleNamespace(last_seq=9, settled_seq=4, complete_at_ms=now_ms() - 60_000)
    return Metrics(bases, SimpleNamespace(lags={"id": lag}), aliases)


def scrape(**stats: EngineStats | None) -> dict[str, float]:
    """Values of a pool, by name and labels.   stats: of each engine, None for one that starts."""
    figures = [
        EngineFigures(name, "ready" if found else "starting", None, found, 0)
        for name, found in stats.items()
    ]
    return samples_of(Metrics(figures_only(*figures), SimpleNamespace(lags={})))


def series_of(name: str, **labels: str) -> str:
    """A series of the engine that is called so, as in the text."""
    shown = {"base": "base", "engine": "engine", **labels}
    pairs = (f'{label}="{shown[label]}"' for label in sorted(shown))
    return f"chorale_{name}{{{','.join(pairs)}}}"


def test_every_engine_has_figures_of_its_own():
    found = scrape(one=make_stats(running=1), two=make_stats(running=2))
    assert [found[series_of("running", engine=name)] for name in ("one", "two")] == [1, 2]


def test_every_tier_has_every_figure_of_its_own():
    found = scrape(engine=make_stats())
    for tier in TIERS:
        for name in ("hits", "misses", "loads", "load_bytes", "load_seconds"):
            series = series_of(f"adapter_tier_{name}_total", tier=tier.tier)
            assert found[series] == getattr(tier, name)
        for name in ("used_bytes", "limit_bytes"):
            series = series_of(f"adapter_tier_{name}", tier=tier.tier)
            assert found[series] == getattr(tier, name)


def test_no_figure_of_the_engine_is_left_out():
    found = scrape(engine=make_stats(pinned_slabs=17))
    names = {series.partition("{")[0] for series in found}
    for field in dataclasses.fields(EngineStats):
        if field.name not in NO_FIGURES:
            name = f"chorale_{field.name}".replace("_per_s", "_per_second")
            assert names & {name, f"{name}_total"}, field.name
    for field in dataclasses.fields(TierStats):
        if field.name != "tier":
            series = f"chorale_adapter_tier_{field.name}"
            assert names & {series, f"{series}_total"}, field.name
    for field in dataclasses.fields(GrammarStats):
        if field.name != "tenants":
            assert f"chorale_grammar_{field.name}_total" in names
    for field in dataclasses.fields(DraftStats):
        series = f"chorale_speculation_{field.name}"
        assert names & {series, f"{series}_total"}, field.name
    assert found[series_of("pinned_slabs")] == 17


def test_the_tenants_whose_grammars_take_most_have_their_seconds():
    grammars = GrammarStats(masks=3, tenants=(("t-1", 1.5),))
    found = scrape(engine=make_stats(grammars=grammars))
    assert found[series_of("grammar_masks_total")] == 3
    assert found[series_of("grammar_tenant_seconds", tenant="t-1")] == 1.5


def test_drafts_are_counted_and_their_pools_are_measured():
    drafts = DraftStats(drafted_tokens=9, accepted_tokens=5, verified_rows=2, pools=1, pool_bytes=7)
    found = scrape(engine=make_stats(drafts=drafts))
    counters = ("drafted_tokens", "accepted_tokens", "verified_rows")
    assert [found[series_of(f"speculation_{name}_total")] for name in counters] == [9, 5, 2]
    gauges = ("pools", "pool_bytes")
    assert [found[series_of(f"speculation_{name}")] for name in gauges] == [1, 7]


def test_the_seconds_of_steps_are_counted_by_phase():
    found = samples_of(make_metrics())
    for phase, seconds in STEP_SECONDS:
        assert found[series_of("step_seconds_total", phase=phase)] == seconds


def test_a_request_is_in_every_figure_of_requests():
    metrics = make_metrics()
    note_request(metrics)
    note_request(metrics, outcome="error", timings=None)
    found, base = samples_of(metrics), '{base="base"}'
    for name, count, seconds in (
        ("time_to_first_token", 2, 0.6), ("inter_token_latency", 4, 1.0),
        ("request_queue", 1, 0.25), ("request_prefill", 1, 0.125), ("request_decode", 1, 1.5),
    ):  # fmt: skip
        assert found[f"chorale_{name}_seconds_count{base}"] == count, name
        assert found[f"chorale_{name}_seconds_sum{base}"] == pytest.approx(seconds), name
    assert found[f"chorale_request_duration_seconds_count{base}"] == 1, "the other one failed"
    assert found['chorale_inter_token_latency_seconds_bucket{base="base",le="0.2"}'] == 0
    assert found['chorale_inter_token_latency_seconds_bucket{base="base",le="0.5"}'] == 4
    assert found['chorale_adapter_load_seconds_sum{base="base",tier="disk"}'] == 0.75
    assert found['chorale_requests_total{base="base",cause="",outcome="stop"}'] == 1
    assert found['chorale_requests_total{base="base",cause="",outcome="error"}'] == 1
    assert found[f"chorale_charged_nanousd_total{base}"] == 22
    assert found['chorale_tenant_prompt_tokens_total{tenant="ten_1"}'] == 14
    assert found['chorale_tenant_completion_tokens_total{tenant="ten_1"}'] == 6


def test_the_lag_of_settling_is_in_records_and_in_seconds():
    found = samples_of(make_metrics())
    assert found['chorale_settler_lag_records{engine_id="id"}'] == 5
    assert found['chorale_settler_lag_seconds{engine_id="id"}'] >= 60


def test_prometheus_finds_nothing_to_complain_about():
    metrics = make_metrics()
    note_request(metrics)
    metrics.requests.labels("GET", "/ready", "200").inc()
    metrics.note_proof(Proof(verdict="passed", seconds=0.5))
    command = (needs.program("promtool", "prometheus"), "check", "metrics")
    found = subprocess.run(command, input=metrics.render(), capture_output=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")


def test_vllms_names_are_there_only_if_they_are_asked_for():
    assert b"vllm" not in make_metrics().render()


def test_vllms_names_have_the_same_figures():
    metrics = make_metrics(
        aliases="vllm", total_slabs=10, free_slabs=4, prefix_slabs=1, adapter_slabs=2
    )
    note_request(metrics)
    found = samples_of(metrics)
    theirs, ours = 'engine="engine",model_name="base"', 'base="base",engine="engine"'
    for name, our_name in (
        ("num_requests_running", "running"), ("num_requests_waiting", "waiting"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "completion_tokens_total"),
        ("prefix_cache_queries_total", "prompt_tokens_total"),
        ("prefix_cache_hits_total", "cached_tokens_total"),
    ):  # fmt: skip
        assert found[f"vllm:{name}{{{theirs}}}"] == found[f"chorale_{our_name}{{{ours}}}"]
    assert found[f"vllm:kv_cache_usage_perc{{{theirs}}}"] == 3 / 8
    for name, our_name in (
        ("time_to_first_token", "time_to_first_token"),
        ("inter_token_latency", "inter_token_latency"),
        ("e2e_request_latency", "request_duration"), ("request_queue_time", "request_queue"),
        ("request_prefill_time", "request_prefill"), ("request_decode_time", "request_decode"),
    ):  # fmt: skip
        for kind, more in (("sum", ""), ("count", ""), ("bucket", ',le="0.5"')):
            alias = (
                f'vllm:{name}_seconds_{kind}{{{more[1:] + "," if more else ""}model_name="base"}}'
            )
            assert found[alias] == found[f'chorale_{our_name}_seconds_{kind}{{base="base"{more}}}']
    adapters = 'running_lora_adapters="poet",waiting_lora_adapters="judge@2"'
    series = (
        f'vllm:lora_requests_info{{engine="engine",max_lora="64",model_name="base",{adapters}}}'
    )
    assert found[series] > 1.7e9


def test_an_engine_that_is_away_has_no_figures():
    away = {series: value for series, value in scrape(engine=None).items() if "engine=" in series}
    assert away == {series_of("engine_ready"): 0.0}
    assert scrape(engine=make_stats())[series_of("engine_ready")] == 1.0


def test_proofs_are_counted_by_their_verdict():
    metrics = Metrics(figures_only(), SimpleNamespace(lags={}))
    for verdict in ("passed", "passed", "no_effect"):
        metrics.note_proof(Proof(verdict=verdict, seconds=0.5))
    text = metrics.render().decode()
    assert 'chorale_adapter_proof_seconds_count{verdict="passed"} 2.0' in text
    assert 'chorale_adapter_proof_seconds_sum{verdict="no_effect"} 0.5' in text
