"""deploy/ and docs/operator agree with the code, as far as can be checked without containers."""

import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from registry.storage.url import S3Location, parse_storage_url
from server.api.addresses import is_in
from server.api.endpoints import machines as machine_routes
from server.api.http_protocol import HttpLimits
from server.console.page_route import OPERATORS
from server.launch.prepare import prepare, resolve_settings
from server.launch.secrets import Secrets
from server.launch.settings import InvalidSetting, Settings, load_settings
from server.launch.supervisor import ChildSpec
from tests import needs
from tests.ci_scripts import load_script
from tests.deployment_files import (
    DEPLOY,
    ROOT,
    Compose,
    MissingVariable,
    dockerfile_steps,
    example_variables,
    filled_variables,
    guide,
    image_environment,
    settle,
    texts,
)
from tests.tiny_models import save_model

check_commands = load_script("docs").check_commands


@pytest.fixture(scope="module")
def compose() -> Compose:
    return Compose.read(filled_variables())


@pytest.fixture(scope="module")
def tiny_specs(tmp_path_factory: pytest.TempPathFactory) -> list[ChildSpec]:
    """Return the processes of `chorale serve` with two engines."""
    folder = tmp_path_factory.mktemp("specs")
    model = save_model(folder / "model")
    settings = Settings(model=str(model), data_dir=folder / "data", port=0, engines=2)
    return prepare(resolve_settings(settings))()


# ---- every file ----


def test_every_variable_of_chorale_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        name for text in texts().values() for name in re.findall(r"\bCHORALE_[A-Z0-9_]+", text)
    }
    assert len(named) > 10
    for name in named:
        with monkeypatch.context() as patch:
            patch.setenv(name, "?")
            # A known variable is accepted, or refused for its value.
            with contextlib.suppress(InvalidSetting, ValueError):
                load_settings({"model": "m"})


def test_every_command_and_flag_of_chorale_exists() -> None:
    # A command of a Dockerfile or of YAML is a list, and is checked with its service.
    checked = [path for path, text in texts().items() if "chorale " in text]
    assert len(checked) > 5
    assert [fault for path in checked for fault in check_commands(path.read_text())] == []


def test_every_setting_and_limit_that_the_guide_names_is_what_it_says() -> None:
    """The guide writes defaults as in `name` (30 s) and `name` (50 ms)."""
    named = re.findall(r"`(\w+)` \((\d+) (s|ms)\)", guide())
    assert len(named) >= 3
    for name, number, unit in named:
        default = getattr(Settings(model="m"), name)
        assert default == int(number) / {"s": 1, "ms": 1000}[unit], name


def test_a_machine_that_is_stopped_has_the_time_that_its_end_takes(
    compose: Compose, tiny_specs: list[ChildSpec]
) -> None:
    stages = {spec.stage: 0.0 for spec in tiny_specs}
    for spec in tiny_specs:
        stages[spec.stage] = max(stages[spec.stage], spec.stop_timeout_s)
    needed_s = sum(stages.values())
    for machine in compose.machines.values():
        assert int(machine["stop_grace_period"].removesuffix("s")) > needed_s
    pod = (DEPLOY / "kubernetes" / "base" / "statefulset.yaml").read_text()
    (grace,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", pod)
    (pre_stop,) = re.findall(r'\[sleep, "(\d+)"\]', pod)
    assert int(grace) > needed_s + int(pre_stop)
    assert f"--stop-timeout {machine['stop_grace_period'].removesuffix('s')}" in guide()


# ---- compose ----


def test_what_must_be_given_is_asked_for_by_name() -> None:
    with pytest.raises(MissingVariable):
        Compose.read(example_variables())
    for name in filled_variables().keys() - {"LISTEN"}:
        with pytest.raises(MissingVariable, match=name):
            Compose.read(filled_variables() | {name: ""})


def test_there_are_two_machines_that_differ_in_their_volume_alone(compose: Compose) -> None:
    first, second = compose.machines.values()
    volumes = [first["volumes"], second["volumes"]]
    assert first | {"volumes": None} == second | {"volumes": None}
    data = [volume for mounts in volumes for volume in mounts if volume.endswith(":/data")]
    assert len(set(data)) == 2, "a data directory belongs to one supervisor"
    assert {volume.partition(":")[0] for volume in data} <= compose.document["volumes"].keys()


def test_the_environment_of_a_machine_is_settings(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for machine in compose.machines.values():
        settings = settle(monkeypatch, image_environment() | machine["environment"])
        assert machine["command"] == ["serve"], "the image's own, and nothing but settings"
        assert (settings.host, str(settings.data_dir)) == ("0.0.0.0", "/data")
        mounted = {volume.split(":")[1] for volume in machine["volumes"]}
        assert {settings.model, str(settings.data_dir)} == mounted
        assert settings.engines == 2
        assert Secrets.load(tmp_path, may_make=False), "given, since gateways share them"


def test_a_misspelt_variable_is_an_error(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(compose.machines["chorale-1"]["environment"])
    environment["CHORALE_REDIS_ULR"] = environment.pop("CHORALE_REDIS_URL")
    with pytest.raises(InvalidSetting, match="CHORALE_REDIS_ULR"):
        settle(monkeypatch, image_environment() | environment)


def test_a_machine_speaks_to_services_that_are_there(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = compose.machines["chorale-1"]
    settings = settle(monkeypatch, image_environment() | machine["environment"])
    database = sa.make_url(settings.database_url or "")
    postgres = compose.services[str(database.host)]["environment"]
    assert database.username == postgres["POSTGRES_USER"]
    assert database.password == postgres["POSTGRES_PASSWORD"]
    assert database.database == postgres["POSTGRES_DB"]
    redis_url = urlsplit(settings.redis_url or "")
    redis = compose.services[redis_url.hostname or ""]["command"]
    assert redis[redis.index("--requirepass") + 1] == redis_url.password
    assert compose.services["redis"]["environment"]["REDISCLI_AUTH"] == redis_url.password
    assert redis[redis.index("--maxmemory-policy") + 1] == "noeviction"
    assert redis[redis.index("--save") + 1] == ""
    assert redis[redis.index("--appendonly") + 1] == "no"
    store = parse_storage_url(settings.storage_url)
    assert isinstance(store, S3Location)
    endpoint = urlsplit(store.endpoint_url or "")
    s3 = compose.services[endpoint.hostname or ""]
    assert f"-bucket={store.bucket}" in s3["command"]
    assert f":{endpoint.port}/" in s3["healthcheck"]["test"][-1]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert machine["environment"][name] == s3["environment"][name]
    assert machine["depends_on"].keys() == {database.host, "redis", endpoint.hostname}


def test_a_machine_is_healthy_when_it_is_ready_and_alive_when_it_answers(
    compose: Compose,
) -> None:
    port = image_environment()["CHORALE_PORT"]
    for machine in compose.machines.values():
        assert f"http://127.0.0.1:{port}/ready" in machine["healthcheck"]["test"][-1]
    (check,) = (rest for step, rest in dockerfile_steps() if step == "HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/health" in check
    assert [rest for step, rest in dockerfile_steps() if step == "EXPOSE"] == [port]


def test_a_prometheus_beside_the_machines_may_scrape_them(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DEPLOY / "kubernetes" / "base" / "settings.env").read_text()
    pod = dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))
    machine = compose.machines["chorale-1"]["environment"]
    for environment, address in ((machine, "172.18.0.9"), (pod, "10.244.1.7")):
        with monkeypatch.context() as patch:
            networks = map(
                ip_network, settle(patch, image_environment() | environment).metrics_networks
            )
            assert is_in(address, list(networks))


def test_only_the_balancer_can_be_reached_from_outside(compose: Compose) -> None:
    assert [name for name, service in compose.services.items() if "ports" in service] == [
        "balancer"
    ]


# ---- systemd ----


def test_the_unit_starts_the_installed_command_with_its_paths_and_stops_it_as_compose_does(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (DEPLOY / "chorale.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    for pair in unit["Environment"].split():
        monkeypatch.setenv(*pair.split("=", 1))
    assert str(load_settings({"model": "m"}).data_dir) == f"/var/lib/{unit['StateDirectory']}"
    assert os.environ["XDG_CACHE_HOME"] == f"/var/cache/{unit['CacheDirectory']}"
    assert unit["ExecStart"] == "/opt/chorale/bin/chorale serve"
    assert "python3 -m venv /opt/chorale\n" in guide()
    assert f"useradd --system --home-dir /var/lib/{unit['User']}" in guide()
    assert f"install -m 600 /dev/null {unit['EnvironmentFile']}" in guide()
    assert unit["TimeoutStopSec"] == compose.machines["chorale-1"]["stop_grace_period"]
    assert unit["KillMode"] == "mixed", "SIGTERM is for the supervisor alone"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "chorale.service").read_text()
    unit = tmp_path / "chorale.service"
    unit.write_text(text.replace("/opt/chorale/bin/chorale", shutil.which("true") or ""))
    done = subprocess.run(("systemd-analyze", "verify", unit), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- the load balancer ----


def test_the_balancer_knows_every_machine_and_asks_whether_it_is_ready(
    compose: Compose,
) -> None:
    text = (DEPLOY / "haproxy.cfg").read_text()
    port = image_environment()["CHORALE_PORT"]
    for backend in text.split("\nbackend ")[1:]:
        servers = dict(re.findall(r"^    server (\S+) (\S+)$", backend, re.MULTILINE))
        assert servers == {name: f"{name}:{port}" for name in compose.machines}
    balancer = compose.services["balancer"]
    assert "./haproxy.cfg:/usr/local/etc/haproxy/haproxy.cfg:ro" in balancer["volumes"]
    (bound,) = re.findall(r"^    bind :(\d+)$", text, re.MULTILINE)
    assert balancer["ports"] == [f"127.0.0.1:8080:{bound}"], "plain HTTP for this host alone"
    assert balancer["depends_on"].keys() == compose.machines.keys()
    paths = re.findall(r"option httpchk GET (\S+)", text)
    hidden = re.findall(r"-m beg (.+) } !is_operator", text)[0].split()
    routes = {getattr(route, "path", "") for route in machine_routes.router.routes}
    assert paths == ["/ready", "/health"], "the second of machines of which none is ready"
    assert {"/ready", "/health", "/metrics"} <= routes
    assert hidden == ["/metrics", "/admin", OPERATORS]


def test_the_balancer_may_open_any_number_of_connections_and_a_client_only_some(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settle(
        monkeypatch, image_environment() | compose.machines["chorale-1"]["environment"]
    )
    trusted = [ip_network(network) for network in settings.trusted_proxies]
    # Docker's own choices of networks.
    for address in ("172.17.0.2", "172.31.0.2", "192.168.16.2"):
        assert any(ip_address(address) in network for network in trusted)
    text = (DEPLOY / "haproxy.cfg").read_text()
    (limit,) = re.findall(r"reject if { sc0_conn_cur gt (\d+) }", text)
    assert int(limit) == settings.max_connections_per_address
    (seconds,) = re.findall(r"timeout http-request (\d+)s", text)
    assert int(seconds) == HttpLimits().head_timeout_s


def test_the_balancer_waits_longer_than_any_answer_may_take(compose: Compose) -> None:
    settings = Settings(model="m")
    text = (DEPLOY / "haproxy.cfg").read_text()
    for end in ("client", "server"):
        (seconds,) = re.findall(rf"timeout {end} (\d+)s", text)
        assert int(seconds) > settings.request_timeout_s


def test_every_error_of_the_balancer_is_an_error_object_with_all_four_keys() -> None:
    text = (DEPLOY / "haproxy.cfg").read_text()
    bodies = [json.loads(body) for body in re.findall(r"application/json string '(.+?)'", text)]
    assert len(bodies) == len(re.findall(r"(http-error|http-request return) status", text)) == 6
    assert re.findall(r"status (5..) .* hdr retry-after [1-9]", text) == ["502", "503", "504"]
    for body in bodies:
        assert body["error"].keys() == {"message", "type", "param", "code"}


def test_haproxy_reads_its_file() -> None:
    command = (needs.program("haproxy", "haproxy"), "-c", "-f", DEPLOY / "haproxy.cfg")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- the image ----


def test_what_the_image_copies_is_there_and_is_sent_to_the_builder() -> None:
    allowed = _allowed_in_context()
    sources = [
        source
        for step, rest in dockerfile_steps()
        if step == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert len(sources) > 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in allowed, source
    packages = re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text())
    assert packages
    assert set(packages) <= set(sources), "all that the package is made of"


def test_no_data_directory_and_no_secret_is_sent_to_the_builder() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    for name in (".chorale", "deploy", ".git", ".venv", ".env"):
        assert not any(fnmatch.fnmatch(name, allowed) for allowed in _allowed_in_context())


def test_the_image_installs_no_file_but_ours_without_a_hash() -> None:
    installs = [rest for step, rest in dockerfile_steps() if step == "RUN" and "pip " in rest]
    *packages, ours = (install.partition(" install --no-deps ")[2] for install in installs)
    assert packages == [f"--require-hashes -r requirements/{n}.txt" for n in ("$TORCH", "base")]
    assert ours == "--no-build-isolation . && python -m pip check"


def test_hashed_packages_have_the_versions_that_are_tested_and_none_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    tested = _pins(ROOT / "constraints.txt", "$")
    torch = load_script("install_torch").TORCH.partition("==")[2]
    files = [DEPLOY / "requirements" / f"{name}.txt" for name in ("base", "cpu", "cuda")]
    base, cpu, cuda = map(_pins, files)
    assert base.keys() - tested.keys() == {"setuptools"}, "which builds our own package"
    for pins in (base, cuda):
        assert {name: tested.get(name, version) for name, version in pins.items()} == pins
    assert (cpu, cuda["torch"]) == ({"torch": torch}, torch)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in load_script("requirements").EXTRAS]
    needed = [
        Requirement(text).name for texts in (project["dependencies"], *extras) for text in texts
    ]
    assert {canonicalize_name(name) for name in needed} <= base.keys() | cuda.keys()


def test_the_image_runs_as_nobody_in_particular_and_stops_by_sigterm() -> None:
    steps = dockerfile_steps()
    last = steps[max(i for i, (step, _) in enumerate(steps) if step == "FROM") :]
    named = dict(last)
    assert named["USER"] == "10001"
    assert named["STOPSIGNAL"] == "SIGTERM"
    # Both are lists: with a string a shell would run the command and keep the signal to itself.
    assert (named["ENTRYPOINT"], named["CMD"]) == ('["chorale"]', '["serve"]')
    assert image_environment()["CHORALE_DATA_DIR"] == named["VOLUME"]


# ---- helpers ----


def _allowed_in_context() -> list[str]:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def _pins(path: Path, hashes: str = r" \\\n    --hash=sha256:[0-9a-f]{64}") -> dict[str, str]:
    """Return the version of every package in a file; each has a hash, or what stands for one."""
    text = path.read_text()
    found = re.findall(rf"^([\w.-]+)==([^\s;]+).*?{hashes}", text, re.MULTILINE)
    assert len(found) == text.count("==") - text.count(" == ")
    return {canonicalize_name(name): version for name, version in found}
