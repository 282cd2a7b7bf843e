"""A real Prometheus scrapes a loaded stack: every panel, rule and alert finds what it asks for."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.prometheus import DEPLOY, Prometheus
from tests.e2e.stack import Stack, Tenant
from tests.engine.fake_engine import POISON

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
_numbers = itertools.count(200)
VARIABLES = {"$__rate_interval": "1m", "$base": ".*", "$engine": ".*"}


@pytest.fixture(scope="module")
def asking(scripted: Stack, tiny_adapters: dict[str, Path]) -> tuple[Tenant, Tenant]:
    """A tenant with adapters, and one without a budget."""
    tenant = scripted.tenant("scraped")
    for name in ("alpha", "beta"):
        tenant.push(name, tiny_adapters[name])
    return tenant, scripted.tenant("poor", monthly_budget="0")


@pytest.fixture(scope="module")
def prometheus(scripted: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{scripted.port}")
    with contextlib.closing(started):
        yield started


def ask(tenant: Tenant, model: str, *first_tokens: int) -> int:
    """Ask for an answer of a few tokens; return the status of the answer.

    No request is the same as another: one that had been on its way at two deaths would be refused.
    """
    prompt = [*first_tokens, *[5, 6, 7] * 20, *divmod(next(_numbers), 200)]
    body = {"model": model, "prompt": prompt, "max_tokens": 8}
    return tenant.http.post("/v1/completions", json=body).status_code


def load(acme: Tenant, poor: Tenant) -> None:
    """Send requests for the base and each adapter, and one that is refused."""
    assert ask(poor, "base") == 429
    for model in ("base", "base", *acme.adapters):
        assert ask(acme, model) == 200


def kill_engine(tenant: Tenant, number: int) -> None:
    """Have a request kill the engine, and wait for the next engine, which has to load adapters."""
    assert ask(tenant, "base", POISON, number) == 503
    tenant.stack.wait(lambda: ask(tenant, "base") == 200)


def queries() -> Iterator[tuple[str, str]]:
    """Yield (where, query): of each panel, of each recording rule and of each part of an alert.

    An alert's query has no answer while all is well. So of each side of its comparisons, the part
    that names series has to have an answer.
    """
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for variable, value in VARIABLES.items():
                    query = query.replace(variable, value)
                assert "$" not in query, f"{panel['title']}: an unknown variable"
                yield f"{path.stem}: {panel['title']} {target['refId']}", query
    rules = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        if "record" in rule:
            yield rule["record"], rule["record"]
        else:
            # This engine loads every adapter: faulty/test_night.py has the causes of failed loads.
            expr = re.sub(r'\{cause=~"adapter_[^}]*\}', "", rule["expr"])
            for name in re.findall(r"chorale[_:][\w:]+(?:\{[^}]*\})?", expr):
                yield f"{rule['alert']}: {name}", f"count({name})"


def test_every_panel_rule_and_alert_finds_what_it_asks_for(
    asking: tuple[Tenant, Tenant], prometheus: Prometheus
) -> None:
    """Metrics with vLLM's names are there for routers."""
    missing = dict(queries()) | {
        name: f'vllm:{name}{{model_name="base"}}'
        for name in (
            "num_requests_running", "lora_requests_info", "kv_cache_usage_perc",
            "e2e_request_latency_seconds_count",
        )
    }  # fmt: skip
    assert len(missing) > 100
    assert not prometheus.finds("count(chorale_no_such_metric)")
    for number in range(2):
        kill_engine(asking[0], number)
        load(*asking)

    def has_all() -> bool:
        if any("adapter_load" in query for query in missing.values()):
            asking[0].stack.make_cold()
        load(*asking)
        for where, query in list(missing.items()):
            if prometheus.finds(query):
                del missing[where]
        return not missing

    try:
        Stack.wait(has_all, timeout_s=60)
    except AssertionError:
        pytest.fail(f"no answers to {missing}")


def test_dashboards_have_panels_of_their_own_place_and_name() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(places)) == len(panels) == len({panel["id"] for panel in panels})
        assert len({panel["title"] for panel in panels}) == len(panels)
