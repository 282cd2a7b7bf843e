"""What a scraper reads: Prometheus's own parser on what the gateway prints."""

import dataclasses
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import EngineStats, TierStats
from registry.proof import Proof
from server.metrics import Metrics

TIERS = tuple(
    TierStats(
        tier=tier, hits=10 * i, misses=i, loads=i + 2, load_bytes=1 << (20 + i),
        load_seconds=i + 0.25, used_bytes=4096 * i, limit_bytes=8192 * i,
    )
    for i, tier in enumerate(("device", "host", "disk", "store"), start=1)
)  # fmt: skip


def make_stats(**figures: object) -> EngineStats:
    names = [field.name for field in dataclasses.fields(EngineStats) if field.name != "tiers"]
    return EngineStats(**dict.fromkeys(names, 3) | {"tiers": TIERS} | figures)


def scrape(stats: EngineStats | None, *, is_ready: bool = True) -> dict[tuple[str, str], float]:
    """Value by sample name and tier."""
    engines = SimpleNamespace(is_ready=is_ready, num_deaths=0, stats=stats)
    text = Metrics(engines, SimpleNamespace(lags={})).render().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    found = {(s.name, s.labels.get("tier", "")): s.value for s in samples if "le" not in s.labels}
    assert len(found) == len([s for s in samples if "le" not in s.labels]), "a series twice"
    return found


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
        if field.name != "tiers":
            assert names & {f"chorale_{field.name}", f"chorale_{field.name}_total"}, field.name
    for field in dataclasses.fields(TierStats):
        if field.name != "tier":
            series = f"chorale_adapter_tier_{field.name}"
            assert names & {series, f"{series}_total"}, field.name
    assert scrape(stats)["chorale_pinned_slabs", ""] == 17


@pytest.mark.parametrize(("stats", "is_ready"), [(None, True), (make_stats(), False)])
def test_an_engine_that_is_away_has_no_figures(stats, is_ready):
    found = scrape(stats, is_ready=is_ready)
    assert found["chorale_engine_ready", ""] == is_ready
    assert not [name for name, _ in found if "tier" in name or "slabs" in name]


def test_proofs_are_counted_by_their_verdict():
    engines = SimpleNamespace(is_ready=False, num_deaths=0, stats=None)
    metrics = Metrics(engines, SimpleNamespace(lags={}))
    for verdict in ("passed", "passed", "no_effect"):
        metrics.note_proof(Proof(verdict=verdict, seconds=0.5))
    text = metrics.render().decode()
    assert 'chorale_adapter_proof_seconds_count{verdict="passed"} 2.0' in text
    assert 'chorale_adapter_proof_seconds_sum{verdict="no_effect"} 0.5' in text
