"""The figures of a gateway, read from `GET /metrics`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

NAMES = {
    "settler lag": "chorale_settler_lag_records",
    "audited at": "chorale_audit_last_success_timestamp_seconds",
    "audit findings": "chorale_audit_findings",
    "limits degraded": "chorale_limiter_degraded",
    "engine deaths": "chorale_engine_deaths_total",
}
"""Metrics by the words that commands have for them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Samples by the metric's name, of all engines and gateways that the scrape has."""

    samples: Mapping[str, list[float]] = field(default_factory=dict)

    def get(self, word: str) -> float | None:
        """The largest sample of a metric; None if this gateway has no such metric."""
        return max(self.samples.get(NAMES[word], ()), default=None)


def read_figures(text: str) -> Figures:
    """The figures in Prometheus's format. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.value)
    return Figures(samples)
