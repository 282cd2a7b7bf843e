"""The figures of a gateway, read from `GET /metrics`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

_NAMES = {
    "settler lag": "chorale_settler_lag_records",
    "unsettled": "chorale_unsettled_records",
    "oldest hold": "chorale_oldest_expired_hold_seconds",
    "holds seen at": "chorale_waits_last_look_timestamp_seconds",
    "audited at": "chorale_audit_last_success_timestamp_seconds",
    "audit findings": "chorale_audit_findings",
    "limits degraded": "chorale_limiter_degraded",
    "engine deaths": "chorale_engine_deaths_total",
}
"""Our words for metrics, the only place that knows the metrics' own names."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Samples by the metric's name, of all engines and gateways that the scrape has."""

    samples: Mapping[str, list[float]] = field(default_factory=dict)

    def get(self, word: str, combine: Callable[[Iterable[float]], float] = max) -> float | None:
        """One figure of all samples of a metric; None if this gateway has no such metric."""
        found = self.samples.get(_NAMES[word])
        return combine(found) if found else None


def read_figures(text: str) -> Figures:
    """The figures in Prometheus's format. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.value)
    return Figures(samples)
