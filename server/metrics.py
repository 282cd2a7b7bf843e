"""Figures for Prometheus: counted here, or read off the engine's last heartbeat when asked."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import TierStats
from registry.proof import Proof
from server.audit.report import Report
from server.engines import Engines
from server.settler import Settler

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PROOF_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_GAUGES = {
    "running": "Requests in the running batch",
    "waiting": "Requests queued in the engine",
    "batch_requests": "Requests of the largest step of the last quarter second",
    "batch_tokens": "Tokens of that step",
    "batch_adapters": "Distinct adapters of that step",
    "free_slabs": "Free slabs of the arena",
    "total_slabs": "Slabs of the arena",
    "adapter_slabs": "Slabs that hold adapters",
    "prefix_slabs": "Slabs of idle KV that may be found again",
    "prefill_tokens_per_s": "Prefill speed of the last minute: what recomputing costs",
    "copy_bytes_per_s": "Copies between device and host: what swapping costs",
    "pinned_slabs": "Slabs of adapters that the operator pinned",
    "unsettled_records": "End records that the ledger does not have yet",
}
_COUNTERS = {
    "steps": "Steps since the engine started",
    "prompt_tokens": "Prompt tokens of ended requests since the engine started",
    "completion_tokens": "Tokens generated since the engine started",
    "cached_tokens": "Those prompt tokens that were found in the prefix cache",
    "preemptions": "Requests that gave back their blocks",
    "swapped": "Those whose KV was kept in host memory meanwhile",
    "prefix_evictions": "Blocks evicted from the prefix cache",
    "adapter_evictions": "Adapters evicted from the arena",
}
# Of each tier of adapters: device, host, disk, store.
_TIER_COUNTERS = {
    "hits": "Requests that found their adapter in this tier when they arrived",
    "misses": "Requests that had to ask the next tier",
    "loads": "Adapters that came into this tier",
    "load_bytes": "Their bytes",
    "load_seconds": "Time they were under way, added up",
}
_TIER_GAUGES = {
    "used_bytes": "Bytes of adapters in this tier",
    "limit_bytes": "Bytes that may be there; 0 without a limit",
}


class _EngineCollector(Collector):
    """The engine's figures of a quarter of a second ago; none while it is away."""

    def __init__(self, engines: Engines, settler: Settler) -> None:
        self._engines = engines
        self._settler = settler

    def collect(self) -> Iterator[Metric]:
        ready = float(self._engines.is_ready)
        yield GaugeMetricFamily("chorale_engine_ready", "1 while the engine serves", ready)
        yield CounterMetricFamily(
            "chorale_engine_deaths", "Engines lost since start", self._engines.num_deaths
        )
        for lag in self._settler.lags.values():
            behind = lag.last_seq - lag.settled_seq
            yield GaugeMetricFamily("chorale_settler_lag_records", "Unposted records", behind)
        stats = self._engines.stats
        if stats is None or not ready:
            return
        for name, help_text in _GAUGES.items():
            yield GaugeMetricFamily(f"chorale_{name}", help_text, getattr(stats, name))
        for name, help_text in _COUNTERS.items():
            yield CounterMetricFamily(f"chorale_{name}", help_text, getattr(stats, name))
        yield from _tier_families(stats.tiers)


class Metrics:
    """One registry a gateway, so that tests may make several."""

    def __init__(self, engines: Engines, settler: Settler) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engines, settler))
        self.requests = Counter(
            "chorale_http_requests",
            "Requests answered, by status",
            ["method", "status"],
            registry=self._registry,
        )
        self.lines_dropped = Gauge(
            "chorale_log_lines_dropped",
            "Log lines that were not written: who reads them was too slow",
            registry=self._registry,
        )
        self.time_to_first_token = Histogram(
            "chorale_time_to_first_token_seconds",
            "From the request's arrival at the gateway to its first tokens",
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
            "What events are worth by their prices, less what was charged, by the last audit",
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
            "When the last audit that found no difference was made; 0: none by this gateway",
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


def _tier_families(tiers: Sequence[TierStats]) -> Iterator[Metric]:
    """Every figure of a tier as one family, labelled with the tier's name."""
    for name, help_text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"chorale_adapter_tier_{name}", help_text, labels=["tier"])
        for tier in tiers:
            counter.add_metric([tier.tier], getattr(tier, name))
        yield counter
    for name, help_text in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"chorale_adapter_tier_{name}", help_text, labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.tier], getattr(tier, name))
        yield gauge
