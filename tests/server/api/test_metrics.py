"""The gateway's metrics, read by Prometheus's own parser."""

import dataclasses
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from engine.messages import DraftStats, EngineStats, GrammarStats, TierStats
from registry.proof import Proof
from server.api.metrics import Metrics
from server.pool.engines import EngineFigures
from tests.server.bases import figures_only

TIERS = tuple(
    TierStats(
        tier=tier, hits=10 * i, misses=i, loads=i + 2, load_bytes=1 << (20 + i),
        load_seconds=i + 0.25, used_bytes=4096 * i, limit_bytes=8192 * i,
    )
    for i, tier in enumerate(("device", "host", "disk", "store"), start=1)
)  # fmt: skip


NO_FIGURES = {"tiers", "grammars", "drafts", "is_leaving", "silence_s"}


def make_stats(**figures: object) -> EngineStats:
    names = [f.name for f in dataclasses.fields(EngineStats) if f.name not in NO_FIGURES]
    return EngineStats(**dict.fromkeys(names, 3) | {"tiers": TIERS} | figures)


Found = dict[tuple[str, str], float]


def scrape_pool(**stats: EngineStats | None) -> dict[str, Found]:
    """Values by (sample name, tier), by engine; "" has the gateway's own."""
    figures = [
        EngineFigures(name, "ready" if found else "starting", None, found, 0)
        for name, found in stats.items()
    ]
    bases = figures_only(*figures)
    text = Metrics(bases, SimpleNamespace(lags={})).render().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    pool: dict[str, Found] = {}
    for sample in samples:
        if "le" not in sample.labels:
            found = pool.setdefault(sample.labels.get("engine", ""), {})
            series = sample.name, sample.labels.get("tier", "")
            assert series not in found, "a series is there twice"
            found[series] = sample.value
    return pool


def scrape(stats: EngineStats | None) -> Found:
    """Values by (sample name, tier) of a pool's single engine."""
    return scrape_pool(engine=stats)["engine"]


def test_every_engine_has_figures_of_its_own():
    pool = scrape_pool(one=make_stats(running=1), two=make_stats(running=2))
    assert [pool[name]["chorale_running", ""] for name in ("one", "two")] == [1, 2]


def test_every_tier_has_every_figure_of_its_own():
    found = scrape(make_stats())
    for tier in TIERS:
        for name in ("hits", "misses", "loads", "load_bytes", "load_seconds"):
            sample = (f"chorale_adapter_tier_{name}_total", tier.tier)
            assert found[sample] == getattr(tier, name)
        for name in ("used_bytes", "limit_bytes"):
            assert found[f"chorale_adapter_tier_{name}", tier.tier] == getattr(tier, name)


def test_no_figure_of_the_engine_is_left_out():
    stats = make_stats(pinned_slabs=17)
    names = {name for name, _ in scrape(stats)}
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
    assert scrape(stats)["chorale_pinned_slabs", ""] == 17


def test_the_tenants_whose_grammars_take_most_have_their_seconds():
    grammars = GrammarStats(masks=3, tenants=(("t-1", 1.5),))
    found = scrape(make_stats(grammars=grammars))
    assert found["chorale_grammar_masks_total", ""] == 3
    assert found["chorale_grammar_tenant_seconds", ""] == 1.5


def test_drafts_are_counted_and_their_pools_are_measured():
    drafts = DraftStats(drafted_tokens=9, accepted_tokens=5, verified_rows=2, pools=1, pool_bytes=7)
    found = scrape(make_stats(drafts=drafts))
    counters = ("drafted_tokens", "accepted_tokens", "verified_rows")
    assert [found[f"chorale_speculation_{name}_total", ""] for name in counters] == [9, 5, 2]
    gauges = ("pools", "pool_bytes")
    assert [found[f"chorale_speculation_{name}", ""] for name in gauges] == [1, 7]


def test_an_engine_that_is_away_has_no_figures():
    assert scrape(None) == {("chorale_engine_ready", ""): 0.0}
    assert scrape(make_stats())["chorale_engine_ready", ""] == 1.0


def test_proofs_are_counted_by_their_verdict():
    metrics = Metrics(figures_only(), SimpleNamespace(lags={}))
    for verdict in ("passed", "passed", "no_effect"):
        metrics.note_proof(Proof(verdict=verdict, seconds=0.5))
    text = metrics.render().decode()
    assert 'chorale_adapter_proof_seconds_count{verdict="passed"} 2.0' in text
    assert 'chorale_adapter_proof_seconds_sum{verdict="no_effect"} 0.5' in text
