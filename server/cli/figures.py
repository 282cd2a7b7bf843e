"""The figures of a gateway, read from `GET /metrics`."""

NAMES = {
    "settler lag": "chorale_settler_lag_records",
    "audited at": "chorale_audit_last_success_timestamp_seconds",
    "audit findings": "chorale_audit_findings",
    "limits degraded": "chorale_limiter_degraded",
    "engine deaths": "chorale_engine_deaths_total",
}
"""Metrics by the words that commands have for them."""


def read_figures(text: str) -> dict[str, float]:
    """The largest sample of each metric, by its word, as far as this gateway has the metric.

    text: in Prometheus's format. Raises ValueError.
    """
    from prometheus_client.parser import text_string_to_metric_families

    words = {name: word for word, name in NAMES.items()}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if word := words.get(sample.name):
                found[word] = max(sample.value, found.get(word, sample.value))
    return found
