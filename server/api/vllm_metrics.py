"""Figures under the names that vLLM gives them, for routers and dashboards that were made for it.

They are the same samples as under our own names; `base` is called `model_name`, as it is there.
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.inference.bases import Bases

_OF_ENGINES = {
    "num_requests_running": "chorale_running",
    "num_requests_waiting": "chorale_waiting",
    "prompt_tokens": "chorale_prompt_tokens",
    "generation_tokens": "chorale_completion_tokens",
    "prefix_cache_queries": "chorale_prompt_tokens",
    "prefix_cache_hits": "chorale_cached_tokens",
}
_OF_REQUESTS = {
    "time_to_first_token_seconds": "chorale_time_to_first_token_seconds",
    "inter_token_latency_seconds": "chorale_inter_token_latency_seconds",
    "e2e_request_latency_seconds": "chorale_request_duration_seconds",
    "request_queue_time_seconds": "chorale_request_queue_seconds",
    "request_prefill_time_seconds": "chorale_request_prefill_seconds",
    "request_decode_time_seconds": "chorale_request_decode_seconds",
}


class VllmEngines(Collector):
    """vLLM's figures of engines.   ours: collects them under our names."""

    def __init__(self, ours: Collector) -> None:
        self._ours = ours

    def collect(self) -> Iterator[Metric]:
        ours = {family.name: family for family in self._ours.collect()}
        yield from _renamed(_OF_ENGINES, ours)
        yield _kv_usage(ours)


class VllmRequests(Collector):
    """vLLM's figures of requests, and of the adapters that this gateway's requests are for."""

    def __init__(self, ours: Collector, bases: Bases) -> None:
        self._ours = ours
        self._bases = bases

    def collect(self) -> Iterator[Metric]:
        ours = {family.name: family for family in self._ours.collect()}
        yield from _renamed(_OF_REQUESTS, ours)
        yield self._adapters()

    def _adapters(self) -> Metric:
        """Adapters with a request that has begun, and with one that waits. An engine here has no
        limit but that of its requests, each of which may be for an adapter of its own.
        """
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Unix seconds; the labels say which adapters run and wait",
            labels=("model_name", "engine", *labels),
        )
        for base in self._bases.current:
            requests = base.running.requests
            for engine in base.engines.figures():
                own = [r for r in requests if r.adapter and r.engine == engine.name]
                running = {r.adapter for r in own if r.adapter and r.has_begun}
                waiting = {r.adapter for r in own if r.adapter} - running
                most = str(engine.welcome.max_num_seqs) if engine.welcome else "0"
                names = (",".join(sorted(running)), ",".join(sorted(waiting)))
                family.add_metric((base.model_id, engine.name, most, *names), time.time())
        return family


def _renamed(names: Mapping[str, str], ours: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield families under vLLM's names.   names: ours by theirs."""
    for name, our_name in names.items():
        family = ours[our_name]
        renamed = Metric(f"vllm:{name}", family.documentation, family.type)
        for sample in family.samples:
            renamed.add_sample(
                sample.name.replace(our_name, renamed.name, 1),
                {_LABELS.get(label, label): value for label, value in sample.labels.items()},
                sample.value,
            )
        yield renamed


_LABELS = {"base": "model_name"}


def _kv_usage(ours: Mapping[str, Metric]) -> Metric:
    """The share of the slabs without adapters that requests hold for their KV, from 0 to 1."""
    family = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc",
        "Share of the slabs without adapters that requests hold for their KV; 1 is all",
        labels=("engine", "model_name"),
    )
    names = ("total_slabs", "free_slabs", "prefix_slabs", "adapter_slabs")
    samples = [ours[f"chorale_{name}"].samples for name in names]
    for total, free, idle, adapters in zip(*samples, strict=True):
        room = total.value - adapters.value
        used = room - free.value - idle.value
        family.add_metric((total.labels["engine"], total.labels["base"]), used / max(1, room))
    return family
