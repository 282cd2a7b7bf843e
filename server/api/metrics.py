"""Figures for Prometheus: counted here, or read off the engines' last heartbeats at a scrape."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from registry.uploads.proof import Proof
from server.api.vllm_metrics import VllmEngines, VllmRequests
from server.billing.audit.report import Report
from server.billing.settler import Settler
from server.database.clock import now_ms
from server.inference.bases import Bases
from server.inference.limit_refusals import RefusingLimit
from server.inference.request_metrics import RequestMetrics

_PROOF_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_GAUGES = {
    "running": "Number of requests in the running batch",
    "waiting": "Number of requests queued in the engine",
    "batch_requests": "Number of requests in the largest step of the last quarter second",
    "batch_tokens": "Number of tokens computed in the largest step of the last quarter second",
    "batch_adapters": "Number of distinct adapters in the largest step of the last quarter second",
    "free_slabs": "Number of free slabs of the arena",
    "total_slabs": "Number of slabs of the arena",
    "adapter_slabs": "Number of slabs that hold adapters",
    "prefix_slabs": "Number of slabs with KV that no request uses and a later one may use again",
    "prefill_tokens_per_s": "Prompt tokens per second in the last minute: the price of recomputing",
    "copy_bytes_per_s": "Bytes per second copied between device and host: the price of swapping",
    "pinned_slabs": "Number of slabs that hold pinned adapters",
    "unsettled_records": "Number of journal records of ended requests that are not in the ledger",
}
_COUNTERS = {
    "steps": "Number of steps since the engine started",
    "prompt_tokens": "Prompt tokens of ended requests since the engine started",
    "completion_tokens": "Tokens generated since the engine started",
    "cached_tokens": "Prompt tokens of ended requests that the prefix cache had",
    "preemptions": "Number of times that a request gave back its blocks",
    "swapped": "Number of preemptions that kept the request's KV in host memory",
    "prefix_evictions": "Number of blocks evicted from the prefix cache",
    "adapter_evictions": "Number of adapters evicted from the arena",
}
_GRAMMAR_COUNTERS = {
    "compiles": "Number of grammars compiled in the engine",
    "compiles_failed": "Number of grammars that the engine could not compile within its limits",
    "compile_seconds": "Seconds of processor time that compiling grammars took, beside the steps",
    "masks": "Number of times that a grammar said what may follow a token",
    "mask_seconds": "Seconds of processor time that this took, beside the steps",
    "forced_tokens": "Tokens that a grammar left no choice about, taken without the model",
    "masks_late": "Number of times that an answer missed a step because its mask was late",
    "masks_failed": "Number of answers that failed because a mask took too much work",
}
_SPECULATION_COUNTERS = {
    "drafted_tokens": "Drafted tokens that steps computed",
    "accepted_tokens": "Drafted tokens that answers got",
    "verified_rows": "Number of times that an answer had drafts in a step",
}
_SPECULATION_GAUGES = {
    "pools": "Number of pools of drafts: one for a tenant and an adapter that share drafts",
    "pool_bytes": "Bytes of host memory in pools of drafts",
}
_GATEWAY_GAUGES = {
    "log_lines_dropped": "Number of log lines that were dropped because they were not read in time",
    "limiter_degraded": "1 while limits lost their state or are counted by each gateway alone, "
    "without Redis",
    "audit_difference_nanousd": "Nano-dollars that all events are worth less those charged for "
    "them, by the last audit",
    "audit_timestamp_seconds": "Unix seconds of this gateway's last audit; 0 if there was none",
    "audit_last_success_timestamp_seconds": "Unix seconds of this gateway's last audit without a "
    "difference; 0 if there was none",
    # What waits too long, as the one gateway that issues statements saw it in its last look.
    "waits_last_look_timestamp_seconds": "Unix seconds of this gateway's last look, 0 if none",
    "oldest_expired_hold_seconds": "Seconds since the expiry of the open hold that expired first",
    "overdue_statements": "Number of last month's statements not issued a day after its end",
}
_MACHINE_GAUGES = {
    "gateways_missing": "Number of gateways of this machine whose figures this scrape lacks",
    "disk_left_bytes": "Bytes left for uploads and caches on the disk of the data directory; below "
    "0 where they are taken of the reserve",
    "disk_size_bytes": "Size of the disk of the data directory",
}
# The tiers of adapters are device, host, disk and store; each has these figures.
_TIER_COUNTERS = {
    "hits": "Number of requests that found their adapter in this tier when they arrived",
    "misses": "Number of requests that missed their adapter in this tier and asked the next one",
    "loads": "Number of adapters loaded into this tier",
    "load_bytes": "Bytes of the adapters loaded into this tier",
    "load_seconds": "Seconds that loading adapters into this tier took, added up",
}
_TIER_GAUGES = {
    "used_bytes": "Bytes of adapters in this tier",
    "limit_bytes": "Bytes of adapters that this tier has room for; 0 means no limit",
}


_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
_LABELS = ("engine", "base")
"""Labels of an engine's figures: its name, and that of its base model, "" if that is gone."""


class _EngineCollector(Collector):
    """The engines' figures, at most a quarter of a second old; none of an engine that is away."""

    def __init__(self, bases: Bases) -> None:
        self._bases = bases

    def collect(self) -> Iterator[Metric]:
        figures = self._bases.figures()
        yield _family(
            GaugeMetricFamily,
            "engine_ready",
            "1 while the engine takes requests, else 0",
            _LABELS,
            (((it.name, base), float(it.state == "ready")) for base, it in figures),
        )
        stats = [((it.name, base), it.stats) for base, it in figures if it.stats]
        yield from _families(GaugeMetricFamily, "", _GAUGES, _LABELS, stats)
        yield from _families(CounterMetricFamily, "", _COUNTERS, _LABELS, stats)
        yield _family(
            CounterMetricFamily,
            "step_seconds",
            "Seconds that steps took, by phase: compute is the model, all else is beside it",
            (*_LABELS, "phase"),
            (((*who, phase), spent) for who, it in stats for phase, spent in it.step_seconds),
        )
        tiers = [((*who, tier.tier), tier) for who, it in stats for tier in it.tiers]
        labels = (*_LABELS, "tier")
        yield from _families(CounterMetricFamily, "adapter_tier_", _TIER_COUNTERS, labels, tiers)
        yield from _families(GaugeMetricFamily, "adapter_tier_", _TIER_GAUGES, labels, tiers)
        grammars = [(who, it.grammars) for who, it in stats]
        yield from _families(CounterMetricFamily, "grammar_", _GRAMMAR_COUNTERS, _LABELS, grammars)
        yield _family(
            GaugeMetricFamily,
            "grammar_tenant_seconds",
            "Seconds of processor time for grammars, of the ten tenants of an engine that took "
            "most",
            (*_LABELS, "tenant"),
            (((*who, tenant_id), spent) for who, it in grammars for tenant_id, spent in it.tenants),
        )
        drafts = [(who, it.drafts) for who, it in stats]
        prefix = "speculation_"
        yield from _families(CounterMetricFamily, prefix, _SPECULATION_COUNTERS, _LABELS, drafts)
        yield from _families(GaugeMetricFamily, prefix, _SPECULATION_GAUGES, _LABELS, drafts)


class _GatewayCollector(Collector):
    """Figures of base models and engines as this gateway alone sees them."""

    def __init__(self, bases: Bases, settler: Settler) -> None:
        self._bases = bases
        self._settler = settler

    def collect(self) -> Iterator[Metric]:
        bases = self._bases.current
        yield _family(
            GaugeMetricFamily,
            "base_requests",
            "Requests under way in this gateway",
            ("base",),
            (((base.model_id,), len(base.running)) for base in bases),
        )
        yield _family(
            GaugeMetricFamily,
            "base_resting",
            "1 while the base model sleeps or is drained, else 0",
            ("base",),
            (((base.model_id,), float(base.keeper.state != "awake")) for base in bases),
        )
        yield CounterMetricFamily(
            "chorale_engine_deaths",
            "Number of engine deaths since the gateway started",
            self._bases.num_deaths,
        )
        lags = self._settler.lags
        yield _family(
            GaugeMetricFamily,
            "settler_lag_records",
            "Number of journal records that the settler has not posted to the ledger",
            ("engine_id",),
            (((engine,), lag.last_seq - lag.settled_seq) for engine, lag in lags.items()),
        )
        yield _family(
            GaugeMetricFamily,
            "settler_lag_seconds",
            "Seconds since the settler last had all of the engine's journal in the ledger",
            ("engine_id",),
            (
                ((engine,), max(0, now_ms() - lag.complete_at_ms) / 1000)
                for engine, lag in lags.items()
                if lag.complete_at_ms is not None
            ),
        )


class Metrics:
    """The metrics of one gateway, in registries of their own, so that tests may make several.

    Several gateways of a machine have the same figures of engines.
    gauges: by name.   of_requests: those of requests.   aliases: whose names some figures have as
    well.
    """

    def __init__(self, bases: Bases, settler: Settler, aliases: Literal["", "vllm"] = "") -> None:
        self._engines, self._registry = CollectorRegistry(), CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        engines, self.of_requests = _EngineCollector(bases), RequestMetrics()
        self._engines.register(engines)
        self._registry.register(_GatewayCollector(bases, settler))
        self._registry.register(self.of_requests)
        if aliases == "vllm":
            self._engines.register(VllmEngines(engines))
            self._registry.register(VllmRequests(self.of_requests, bases))
        self.gauges = {
            name: Gauge(f"chorale_{name}", help_text, registry=registry)
            for registry, helps in (
                (self._engines, _MACHINE_GAUGES),
                (self._registry, _GATEWAY_GAUGES),
            )
            for name, help_text in helps.items()
        }
        self.requests = counter(
            "chorale_http_requests",
            "Number of HTTP requests answered, by method, route and status",
            ["method", "route", "status"],
        )
        self.moves = counter(
            "chorale_request_moves",
            "Number of times that a request moved to another engine: its own was gone or left",
        )
        self.refusals = counter(
            "chorale_limit_refusals",
            "Number of requests that a limit refused, by the kind of limit",
            ["limit"],
        )
        for limit in get_args(RefusingLimit):
            self.refusals.labels(limit)  # so that a first refusal is a rise
        self.proofs = Histogram(
            "chorale_adapter_proof_seconds",
            "Seconds that the proof of an uploaded adapter took in the engine, by verdict",
            ["verdict"],
            buckets=_PROOF_SECONDS,
            registry=self._registry,
        )
        self.audit_findings = Gauge(
            "chorale_audit_findings",
            "Number of differences that the last audit found, by check",
            ["check"],
            registry=self._registry,
        )

    def count_refusal(self, limit: RefusingLimit) -> None:
        self.refusals.labels(limit).inc()

    def note_proof(self, proof: Proof) -> None:
        self.proofs.labels(proof.verdict).observe(proof.seconds)

    def note_audit(self, report: Report) -> None:
        for name, result in report.checks.items():
            self.audit_findings.labels(name).set(result.num_findings)
        figures = {"audit_timestamp_seconds": report.at_ms / 1000}
        if not report.num_findings:
            figures["audit_last_success_timestamp_seconds"] = report.at_ms / 1000
        self.note(figures | {"audit_difference_nanousd": report.difference_nanousd})

    def note(self, figures: Mapping[str, float]) -> None:
        """Set gauges.   figures: by their names."""
        for name, figure in figures.items():
            self.gauges[name].set(figure)

    def render(self) -> bytes:
        return self.render_engines() + self.render_own()

    def render_engines(self) -> bytes:
        """The figures of engines, which all gateways of a machine have alike."""
        return generate_latest(self._engines)

    def render_own(self) -> bytes:
        """The figures of this gateway alone."""
        return generate_latest(self._registry)


def _families(
    kind: _Kind,
    prefix: str,
    helps: Mapping[str, str],
    labels: Sequence[str],
    found: Sequence[tuple[Sequence[str], object]],
) -> Iterator[Metric]:
    """Yields a family for each attribute in `helps`.   found: objects with them, and label values.

    Prometheus writes units out; our own names do not.
    """
    for name, help_text in helps.items():
        rows = ((values, getattr(it, name)) for values, it in found)
        full_name = (prefix + name).replace("_per_s", "_per_second")
        yield _family(kind, full_name, help_text, labels, rows)


def _family(
    kind: _Kind,
    name: str,
    help_text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """A family of samples.   rows: label values and a figure for each sample."""
    family = kind(f"chorale_{name}", help_text, labels=labels)
    for values, figure in rows:
        family.add_metric(values, figure)
    return family
