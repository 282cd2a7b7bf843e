"""deploy/kubernetes, deploy/ray and the alert rules, checked with their tools and our settings."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.wire.messages import GrammarStats
from server.api.metrics import Metrics
from server.billing.audit.report import Report
from server.launch.secrets import Secrets
from server.launch.settings import Settings
from server.pool.engines import EngineFigures
from tests import needs
from tests.deployment_files import (
    DEPLOY,
    FILLED,
    ROOT,
    dockerfile_steps,
    guide,
    image_environment,
    settle,
)
from tests.server.api.test_metrics import make_stats, note_request
from tests.server.bases import figures_only

KUBERNETES = DEPLOY / "kubernetes"
RAY = DEPLOY / "ray"


def read_env(path: Path) -> dict[str, str]:
    """Read lines NAME=value; empty values are filled in."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: value or FILLED for name, _, value in (line.partition("=") for line in lines)}


# ---- Kubernetes ----


def render(folder: Path, overlay: str) -> list[dict[str, Any]]:
    """Return the documents that `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    copy = shutil.copytree(KUBERNETES, folder / "kubernetes")
    shutil.copy(copy / "base" / "secret.example.env", copy / "base" / "secret.env")
    command = ("kubectl", "kustomize", str(copy / overlay))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="module", params=["base", "gpu"])
def manifests(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Any]:
    """Return documents by kind and name, without the hash at the end of generated names."""
    found = render(tmp_path_factory.mktemp("manifests"), request.param)
    return {
        (document["kind"], re.sub(r"-[0-9a-z]{10}$", "", document["metadata"]["name"])): document
        for document in found
    }


def pod_of(manifests: dict[tuple[str, str], Any]) -> dict[str, Any]:
    return dict(manifests["StatefulSet", "chorale"]["spec"]["template"]["spec"])


def test_selectors_select_the_pods(manifests: dict[tuple[str, str], Any]) -> None:
    labels = manifests["StatefulSet", "chorale"]["spec"]["template"]["metadata"]["labels"]
    assert labels
    selectors = [
        manifests["StatefulSet", "chorale"]["spec"]["selector"]["matchLabels"],
        manifests["PodDisruptionBudget", "chorale"]["spec"]["selector"]["matchLabels"],
        manifests["Service", "chorale"]["spec"]["selector"],
        manifests["Service", "chorale-machines"]["spec"]["selector"],
        pod_of(manifests)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


def test_what_a_pod_refers_to_is_there(manifests: dict[tuple[str, str], Any]) -> None:
    stateful, pod = manifests["StatefulSet", "chorale"]["spec"], pod_of(manifests)
    assert ("Service", stateful["serviceName"]) in manifests
    names = {document["metadata"]["name"] for document in manifests.values()}
    (container,) = pod["containers"]
    for source in container["envFrom"]:
        assert all(reference["name"] in names for reference in source.values())
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if len(v) > 1 and
              "persistentVolumeClaim" in v}  # fmt: skip
    assert claims <= names
    volumes = {v["name"] for v in pod["volumes"]}
    volumes |= {t["metadata"]["name"] for t in stateful["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": int(image_environment()["CHORALE_PORT"])}
    for service in ("chorale", "chorale-machines"):
        assert {p["targetPort"] for p in manifests["Service", service]["spec"]["ports"]} == {"http"}


def test_the_variables_of_a_pod_are_settings(
    manifests: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = image_environment() | manifests["ConfigMap", "chorale-settings"]["data"]
    environment |= read_env(KUBERNETES / "base" / "secret.example.env")
    assert environment.keys() >= manifests["Secret", "chorale-secrets"]["data"].keys()
    settings = settle(monkeypatch, environment)
    assert Secrets.load(tmp_path, may_make=False)
    (container,) = pod_of(manifests)["containers"]
    assert container["args"] == ["serve"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {settings.model, str(settings.data_dir)} <= mounts
    # The root is read-only: folders that the image's user and Python write to are mounted.
    assert {"/tmp", "/home/chorale/.cache"} <= mounts
    limits = container["resources"]["limits"]
    assert ("nvidia.com/gpu" in limits) == (settings.device == "cuda")
    cores = container["resources"]["requests"]["cpu"]
    assert settings.threads * settings.engines < int(cores), "one core is the gateway's"


def test_a_pod_runs_as_the_user_of_the_image_and_no_service_sets_its_variables(
    manifests: dict[tuple[str, str], Any],
) -> None:
    pod = pod_of(manifests)
    users = [rest for step, rest in dockerfile_steps() if step == "USER"]
    assert users == [str(pod["securityContext"]["runAsUser"])]
    assert pod["securityContext"]["runAsNonRoot"] is True
    # CHORALE_PORT=tcp://... of the Service called chorale would be an invalid setting.
    assert pod["enableServiceLinks"] is False


def test_a_pod_has_the_rights_that_its_namespace_allows_and_no_token_of_the_cluster(
    manifests: dict[tuple[str, str], Any],
) -> None:
    labels = manifests["Namespace", "chorale"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    pod = pod_of(manifests)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_takes_connections_at_its_port_and_opens_those_that_its_settings_need(
    manifests: dict[tuple[str, str], Any],
) -> None:
    nothing, ours = (manifests["NetworkPolicy", n]["spec"] for n in ("nothing-else", "chorale"))
    assert nothing == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert ours["podSelector"] == manifests["StatefulSet", "chorale"]["spec"]["selector"]
    assert [rule["ports"] for rule in ours["ingress"]] == [[{"port": "http"}]]
    secrets = read_env(KUBERNETES / "base" / "secret.example.env")
    urls = [urlsplit(secrets[f"CHORALE_{name}_URL"]) for name in ("DATABASE", "REDIS")]
    opened = {port["port"] for rule in ours["egress"] for port in rule["ports"]}
    assert opened == {53, 443, *(url.port for url in urls)}


def test_probes_ask_what_they_are_for(manifests: dict[tuple[str, str], Any]) -> None:
    (container,) = pod_of(manifests)["containers"]
    asked = {
        probe: container[probe]["httpGet"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert {probe: get["path"] for probe, get in asked.items()} == {
        "startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready",
    }  # fmt: skip
    assert {get["port"] for get in asked.values()} == {"http"}


# ---- Ray ----


@pytest.fixture
def cluster() -> dict[str, Any]:
    return dict(yaml.safe_load((RAY / "cluster.yaml").read_text()))


def test_rays_own_schema_takes_the_cluster_file(cluster: dict[str, Any]) -> None:
    # Ray's schema is read from its file: importing Ray would take longer than all tests here.
    found = importlib.util.find_spec("ray")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no Ray here")
    schema = Path(found.submodule_search_locations[0]) / "autoscaler" / "ray-schema.json"
    jsonschema.validate(cluster, json.loads(schema.read_text()))


def test_the_cluster_has_a_head_without_engines_and_workers_for_them(
    cluster: dict[str, Any],
) -> None:
    kinds = cluster["available_node_types"]
    head = kinds.pop(cluster["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    (worker,) = kinds.values()
    assert 1 <= worker["min_workers"] <= worker["max_workers"] <= cluster["max_workers"]
    assert set(cluster["provider"]) == {"type", "region", "cache_stopped_nodes"}


def test_nodes_are_set_up_as_make_does_it(cluster: dict[str, Any]) -> None:
    commands = " ".join(cluster["setup_commands"])
    assert ".ci/install_torch.py" in commands
    assert "pip --disable-pip-version-check install -c constraints.txt" in commands
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', commands)
    assert {"postgres", "ray", "s3"} <= set(extras.split(","))
    folder, token = cluster["file_mounts"]
    assert token.endswith("/.ray/auth_token")
    for start in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in start[-1]
    assert "export RAY_AUTH_MODE=token" in (RAY / "serve.sh").read_text()
    assert folder.endswith("/chorale")
    assert "cd ~/chorale " in commands


def test_the_settings_of_a_ray_gateway_are_settings(
    cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settle(monkeypatch, read_env(RAY / "chorale.env.example") | {"CHORALE_RAY": "auto"})
    assert Secrets.load(tmp_path, may_make=False)
    assert settings.max_engines == cluster["available_node_types"]["engine"]["max_workers"]
    (mounted,) = re.findall(r"mkdir -p (\S+)", " ".join(cluster["setup_commands"]))
    assert settings.model.startswith(f"{mounted}/"), "on every node"
    assert str(settings.pool_dir).startswith(f"{mounted}/"), "shared by every node"
    assert not str(settings.data_dir).startswith(f"{mounted}/"), "this gateway's own"
    assert settings.data_dir != settings.pool_dir, "a gateway's own"
    assert "serve --ray auto" in (RAY / "serve.sh").read_text()
    assert subprocess.run(("bash", "-n", RAY / "serve.sh")).returncode == 0


# ---- Prometheus ----


def rule_groups() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]]
    groups = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
    return groups


def rules() -> Iterator[dict[str, Any]]:
    """Yield every alert rule, with the expressions of recording rules put in for their names."""
    all_rules = [rule for group in rule_groups() for rule in group["rules"]]
    recorded = {rule["record"]: rule["expr"] for rule in all_rules if "record" in rule}
    for rule in all_rules:
        if "alert" in rule:
            for name, expr in recorded.items():
                rule["expr"] = re.sub(rf"{name}\b", lambda _, expr=expr: expr, rule["expr"])
            yield rule


def series() -> dict[str, set[str]]:
    """Return every series that a gateway with an engine shows, with its labels."""
    stats = make_stats(grammars=GrammarStats(tenants=(("ten_1", 1.0),)))
    bases = figures_only(EngineFigures("engine", "ready", None, stats, 0))
    lag = SimpleNamespace(last_seq=1, settled_seq=0, complete_at_ms=1)
    metrics = Metrics(bases, SimpleNamespace(lags={"engine": lag}))
    metrics.requests.labels("GET", "/ready", "200").inc()
    note_request(metrics)
    metrics.note_audit(_a_report())
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _a_report() -> Report:
    check = SimpleNamespace(num_findings=0)
    return SimpleNamespace(difference_nanousd=0, checks={"c": check}, num_findings=0, at_ms=0)


def test_alerts_ask_for_series_and_labels_that_there_are() -> None:
    known = series()
    for rule in rules():
        named = re.findall(r"(chorale_\w+)(?:\{(\w+)=)?", rule["expr"])
        assert named, rule["alert"]
        for name, label in named:
            assert name in known, f"{rule['alert']}: {name}"
            assert not label or label in known[name], f"{rule['alert']}: {name} has no {label}"


def test_every_alert_fires_when_it_should_and_is_silent_when_it_should_be(tmp_path: Path) -> None:
    # All values are texts: YAML's own types would read 0x240 as a hexadecimal number.
    cases = yaml.load((ROOT / "tests" / "alerts.yaml").read_text(), yaml.BaseLoader)
    alerts = [rule["alert"] for rule in rules()]
    tested = {" ".join(case.split()[:2]) for case in cases}
    assert tested == {f"{alert} {state}" for alert in alerts for state in ("fires", "silent")}
    # Each group is tested alone, since all its rules are evaluated in each of its cases.
    files = []
    for group in rule_groups():
        named = {rule.get("alert") for rule in group["rules"]}
        own = {case: series for case, series in cases.items() if case.split()[0] in named}
        files.append(tmp_path / f"{group['name']}-tests.yaml")
        files[-1].write_text(yaml.safe_dump(rule_tests(group, own, tmp_path)))
    command = (needs.program("promtool", "prometheus"), "test", "rules", *files)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def rule_tests(
    group: dict[str, Any], cases: dict[str, dict[str, str]], folder: Path
) -> dict[str, Any]:
    """Tests of a group in promtool's form.   cases: series by what they are to show."""
    file = folder / f"{group['name']}.yaml"
    file.write_text(yaml.safe_dump({"groups": [group]}))
    tests = []
    for case, series in cases.items():
        alert, state = case.split()[:2]
        is_firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > bool 0'
        samples = [{"labels": "{}", "value": int(state == "fires")}]
        asked = {"expr": f"{is_firing} or vector(0)", "eval_time": "4h", "exp_samples": samples}
        lines = [{"series": name, "values": values} for name, values in series.items()]
        tests.append({"interval": "1m", "input_series": lines, "promql_expr_test": [asked]})
    # Rules are evaluated every five minutes: each minute takes four times as much processor time.
    return {"rule_files": [str(file)], "evaluation_interval": "5m", "tests": tests}


def test_every_alert_says_how_bad_it_is_and_a_row_of_the_guide_what_to_do() -> None:
    rows = re.findall(r"^\| (`Chorale[^|]*) \|", guide(), re.MULTILINE)
    named = re.findall(r"`(Chorale\w+)`", " ".join(rows))
    assert sorted(rule["alert"] for rule in rules()) == sorted(named)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_guide_names_metrics_that_there_are() -> None:
    named = re.findall(r"`(chorale_\w+)", guide())
    known = series()
    assert named
    for name in named:
        assert name in known, name


def test_the_service_level_of_first_tokens_is_a_bucket() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "ChoraleLatencyBudgetBurns")
    (bound,) = set(re.findall(r'le="([^"]*)"', rule["expr"]))
    metrics = Metrics(figures_only(), SimpleNamespace(lags={}))
    note_request(metrics)
    assert f'first_token_seconds_bucket{{base="base",le="{bound}"}}' in metrics.render().decode()
    assert float(bound) == Settings(model="m").slo_first_token_s
