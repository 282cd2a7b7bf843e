"""Figures for Prometheus: counted here, or taken from the engines' last heartbeats on request."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import EngineStats
from registry.proof import Proof
from server.billing.audit.report import Report
from server.billing.settler import Settler
from server.pool.engines import Engines

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PROOF_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_GAUGES = {
    "running": "Requests in the running batch",
    "waiting": "Requests queued in the engine",
    "batch_requests": "Requests in the largest step of the last quarter second",
    "batch_tokens": "Tokens in the step that chorale_batch_requests shows",
    "batch_adapters": "Distinct adapters in the step that chorale_batch_requests shows",
    "free_slabs": "Free slabs of the arena",
    "total_slabs": "Slabs of the arena",
    "adapter_slabs": "Slabs that hold adapters",
    "prefix_slabs": "Slabs of idle KV that later requests may reuse as a prefix",
    "prefill_tokens_per_s": "Prefill speed of the last minute, at which KV is recomputed",
    "copy_bytes_per_s": "Speed of copies between device and host, at which KV is swapped",
    "pinned_slabs": "Slabs of pinned adapters",
    "unsettled_records": "End records that the ledger does not have yet",
}
_COUNTERS = {
    "steps": "Steps since the engine started",
    "prompt_tokens": "Prompt tokens of ended requests since the engine started",
    "completion_tokens": "Tokens generated since the engine started",
    "cached_tokens": "Prompt tokens of ended requests that were found in the prefix cache",
    "preemptions": "Requests that were preempted and gave back their blocks",
    "swapped": "Preempted requests whose KV was kept in host memory meanwhile",
    "prefix_evictions": "Blocks evicted from the prefix cache",
    "adapter_evictions": "Adapters evicted from the arena",
}
# Figures of each tier of adapters: device, host, disk, store.
_TIER_COUNTERS = {
    "hits": "Requests that found their adapter in this tier when they arrived",
    "misses": "Requests that had to ask the next tier",
    "loads": "Adapters that came into this tier",
    "load_bytes": "Bytes of the adapters that came into this tier",
    "load_seconds": "Seconds that adapters took to come into this tier, added up",
}
_TIER_GAUGES = {
    "used_bytes": "Bytes of adapters in this tier",
    "limit_bytes": "Bytes of adapters that this tier may hold; 0 without a limit",
}


class _EngineCollector(Collector):
    """Exports the figures of each engine's last heartbeat, a quarter of a second old. An engine
    that is away has none.
    """

    def __init__(self, engines: Engines, settler: Settler) -> None:
        self._engines = engines
        self._settler = settler

    def collect(self) -> Iterator[Metric]:
        figures = self._engines.figures()
        ready = GaugeMetricFamily(
            "chorale_engine_ready", "1 while the engine serves", labels=["engine"]
        )
        for engine in figures:
            ready.add_metric([engine.name], float(engine.state == "ready"))
        yield ready
        yield CounterMetricFamily(
            "chorale_engine_deaths",
            "Engines lost since the gateway started",
            self._engines.num_deaths,
        )
        lags = GaugeMetricFamily(
            "chorale_settler_lag_records", "End records not posted yet", labels=["engine_id"]
        )
        for engine_id, lag in self._settler.lags.items():
            lags.add_metric([engine_id], lag.last_seq - lag.settled_seq)
        yield lags
        stats = {engine.name: engine.stats for engine in figures if engine.stats}
        for name, help_text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"chorale_{name}", help_text, labels=["engine"])
            yield _of_engines(gauge, name, stats)
        for name, help_text in _COUNTERS.items():
            counter = CounterMetricFamily(f"chorale_{name}", help_text, labels=["engine"])
            yield _of_engines(counter, name, stats)
        yield from _tier_families(stats)


class Metrics:
    """The metrics of one gateway, in a registry of its own so that tests may make several."""

    def __init__(self, engines: Engines, settler: Settler) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines, settler))
        self.requests = Counter(
            "chorale_http_requests",
            "Requests answered, by status",
            ["method", "status"],
            registry=self._registry,
        )
        self.moves = Counter(
            "chorale_request_moves",
            "Requests that moved to another engine because theirs was gone or was leaving",
            registry=self._registry,
        )
        self.lines_dropped = Gauge(
            "chorale_log_lines_dropped",
            "Log lines that were dropped because their reader was too slow",
            registry=self._registry,
        )
        self.limiter_degraded = Gauge(
            "chorale_limiter_degraded",
            "1 while limits have lost their state or are each gateway's own: Redis is or was away",
            registry=self._registry,
        )
        self.time_to_first_token = Histogram(
            "chorale_time_to_first_token_seconds",
            "Time from a request's arrival at the gateway to its first tokens",
            buckets=_SECONDS,
            registry=self._registry,
        )

        self.proofs = Histogram(
            "chorale_adapter_proof_seconds",
            "Proofs of uploaded adapters in the engine, by verdict",
            ["verdict"],
            buckets=_PROOF_SECONDS,
            registry=self._registry,
        )

        self.audit_difference = Gauge(
            "chorale_audit_difference_nanousd",
            "Worth of usage events by their prices minus the amount charged, at the last audit",
            registry=self._registry,
        )
        self.audit_findings = Gauge(
            "chorale_audit_findings",
            "Differences that the last audit found, by check",
            ["check"],
            registry=self._registry,
        )
        self.audit_success = Gauge(
            "chorale_audit_last_success_timestamp_seconds",
            "Time of the last audit without a difference; 0 if this gateway has made none",
            registry=self._registry,
        )

    def note_proof(self, proof: Proof) -> None:
        self.proofs.labels(proof.verdict).observe(proof.seconds)

    def note_audit(self, report: Report) -> None:
        self.audit_difference.set(report.difference_nanousd)
        for name, result in report.checks.items():
            self.audit_findings.labels(name).set(result.num_findings)
        if not report.num_findings:
            self.audit_success.set(report.at_ms / 1000)

    def render(self) -> bytes:
        return generate_latest(self._registry)


_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


def _of_engines(family: _Family, name: str, stats: Mapping[str, EngineStats]) -> _Family:
    for engine, found in stats.items():
        family.add_metric([engine], getattr(found, name))
    return family


def _tier_families(stats: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """Every figure of a tier as one family, labelled with the engine's and the tier's names."""
    labels = ["engine", "tier"]
    for name, help_text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"chorale_adapter_tier_{name}", help_text, labels=labels)
        yield _of_tiers(counter, name, stats)
    for name, help_text in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"chorale_adapter_tier_{name}", help_text, labels=labels)
        yield _of_tiers(gauge, name, stats)


def _of_tiers(family: _Family, name: str, stats: Mapping[str, EngineStats]) -> _Family:
    for engine, found in stats.items():
        for tier in found.tiers:
            family.add_metric([engine, tier.tier], getattr(tier, name))
    return family
