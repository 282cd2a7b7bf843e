"""deploy/compose.yaml as it runs: two machines on one PostgreSQL, Redis and object store."""

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import redis
import sqlalchemy as sa
from moto.server import ThreadedMotoServer

from bench.ports import free_port
from server.billing.tables import holds
from tests import needs
from tests.deployment_files import DEPLOY, Compose, filled_variables, guide
from tests.e2e.composed import Machine, machines
from tests.e2e.stack import Stack, Tenant

PROMPT = [5, 6, 7]


@dataclass
class Fleet:
    """The running deployment.

    machines: the machines of compose.yaml, both ready.
    """

    machines: list[Machine]
    tenant: Tenant

    def on(self, number: int, tenant: Tenant | None = None) -> httpx.Client:
        """Return the tenant's client at the machine with this number."""
        return self.machines[number].client((tenant or self.tenant).api_key)

    def check_billed(self, tenant: Tenant, num_requests: int, num_tokens: int) -> None:
        """Check that the ledger agrees with what the tenant's clients received, once it settled."""

        def billed() -> tuple[int, int]:
            events = self.machines[1].settled_events(0)
            ours = [event for event in events if event["tenant_id"] == tenant.tenant_id]
            return len(ours), sum(event["completion_tokens"] for event in ours)

        with suppress(AssertionError):
            Stack.wait(lambda: billed() == (num_requests, num_tokens), 10)
        assert billed() == (num_requests, num_tokens)


@dataclass
class Streams:
    """Answers received by clients that ask again and again until they are told to stop."""

    statuses: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_whole: int = 0
    num_cut: int = 0
    num_refused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, client: httpx.Client, model: str) -> None:
        body = {
            "model": model, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        num_tokens, status, is_whole = 0, 0, False
        with (
            suppress(httpx.TransportError),
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            status = answer.status_code
            for line in answer.iter_lines():
                is_whole |= line == "data: [DONE]"
                num_tokens += _num_ids(line)
        with self.lock:
            self.num_tokens += num_tokens
            self.num_refused += status == 0
            self.statuses += [status] if status else []
            self.num_whole += status == 200 and is_whole
            self.num_cut += status == 200 and not is_whole


def _num_ids(line: str) -> int:
    if '"token_ids"' not in line:
        return 0
    event = json.loads(line.removeprefix("data: "))
    return sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


@pytest.fixture(scope="module")
def addresses(make_postgres, tmp_path_factory) -> Iterator[dict[str, str]]:
    """Start the services that compose.yaml names, as the file says. Yields their addresses."""
    needs.redis()
    compose = Compose.read(filled_variables())
    environment = compose.machines["chorale-1"]["environment"]
    store = ThreadedMotoServer(port=0, verbose=False)
    store.start()
    _, port = store.get_host_and_port()
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
        aws_access_key_id="any", aws_secret_access_key="any",
    )  # fmt: skip
    client.create_bucket(Bucket="adapters")
    with running_redis(compose.services["redis"]["command"], tmp_path_factory) as redis_port:
        yield {
            environment["CHORALE_DATABASE_URL"]: make_postgres("template1"),
            "redis:6379": f"127.0.0.1:{redis_port}",
            "s3:8333": f"127.0.0.1:{port}",
        }
    store.stop()


@contextmanager
def running_redis(command: list[str], tmp_path_factory: Any) -> Iterator[int]:
    """Run a Redis with the file's own options; yield its port."""
    port = free_port()
    here = ["--port", str(port), "--bind", "127.0.0.1", "--loglevel", "warning"]
    folder = tmp_path_factory.mktemp("redis")
    server = subprocess.Popen([needs.redis(), *command[1:], *here], cwd=folder)
    password = command[command.index("--requirepass") + 1]
    with redis.Redis(port=port, password=password) as client:
        Stack.wait(lambda: _answers(client))
    yield port
    server.kill()
    server.wait()


def _answers(client: redis.Redis) -> bool:
    with suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


@pytest.fixture(scope="module")
def fleet(
    addresses: dict[str, str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    both = machines(tmp_path_factory.mktemp("machines"), tiny_model, addresses)
    try:
        for machine in both:
            machine.start(wait=False)
        for machine in both:
            machine.wait_ready()
        yield Fleet(both, both[0].tenant("acme"))
    finally:
        for machine in both:
            machine.stop()


def test_both_machines_run_what_the_file_says(fleet: Fleet) -> None:
    for machine in fleet.machines:
        body = {"model": machine.model, "prompt": PROMPT, "max_tokens": 3}
        answer = machine.client(fleet.tenant.api_key).post("/v1/completions", json=body)
        assert answer.status_code == 200, "a key made at one is known at the other"
        Stack.wait(lambda machine=machine: len(ready_engines(machine)) == 2)
        engine = Path(f"/proc/{machine.pid('engine')}/environ").read_bytes()
        assert b"AWS_" not in engine
        assert b"CHORALE_" not in engine


def ready_engines(machine: Machine) -> list[str]:
    engines = machine.operator.get("/admin/v1/engines").json()["data"]
    return [engine["name"] for engine in engines if engine["state"] == "ready"]


def test_an_adapter_uploaded_at_one_machine_is_served_by_the_other(
    fleet: Fleet, tiny_adapters: dict[str, Path]
) -> None:
    fleet.tenant.push("alpha", tiny_adapters["alpha"])
    body = {"model": "alpha", "prompt": PROMPT, "max_tokens": 3}
    answers = [fleet.on(number).post("/v1/completions", json=body) for number in (0, 1)]
    digests = {answer.headers["x-chorale-adapter-digest"] for answer in answers}
    assert len(digests) == 1
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_a_limit_is_counted_once_for_both(fleet: Fleet) -> None:
    tenant = fleet.machines[0].tenant("limited", requests_per_minute=6)
    body = {"model": fleet.machines[0].model, "prompt": PROMPT, "max_tokens": 1}
    begun_at = time.monotonic()
    answers = [fleet.on(i % 2, tenant).post("/v1/completions", json=body) for i in range(16)]
    seconds = time.monotonic() - begun_at
    assert {answer.status_code for answer in answers} == {200, 429}
    assert not any("x-chorale-limiter" in answer.headers for answer in answers), "in Redis"
    admitted = sum(answer.status_code == 200 for answer in answers)
    assert 6 <= admitted <= 6 * (1 + seconds / 60)


def test_a_machine_that_is_stopped_loses_nothing_and_the_other_serves_on(fleet: Fleet) -> None:
    """The stopped machine also comes back with the data in its volume."""
    first, second = fleet.machines
    tenant = first.tenant("stopped")
    seen = {machine.name: Streams() for machine in fleet.machines}
    stopping = threading.Event()
    headers = {"authorization": f"Bearer {tenant.api_key}"}

    def keep_asking(machine: Machine) -> None:
        streams = seen[machine.name]
        with httpx.Client(base_url=machine.base_url, headers=headers, timeout=60) as client:
            while not stopping.is_set() and not streams.num_refused:
                streams.ask(client, machine.model)

    with ThreadPoolExecutor(8) as pool:
        for machine in fleet.machines * 4:
            pool.submit(keep_asking, machine)
        Stack.wait(lambda: all(streams.num_whole >= 8 for streams in seen.values()))
        first.terminate()
        assert first.wait_gone() == 0
        wait_for_more(seen[second.name])
        stopping.set()
    assert seen[second.name].num_cut == seen[second.name].num_refused == 0
    assert set(seen[second.name].statuses) == {200}
    assert seen[first.name].num_cut == 0, "what had begun has its end"
    assert set(seen[first.name].statuses) <= {200, 503}
    num_whole = sum(streams.num_whole for streams in seen.values())
    num_tokens = sum(streams.num_tokens for streams in seen.values())
    fleet.check_billed(tenant, num_whole, num_tokens)
    first.start()
    body = {"model": "alpha", "prompt": PROMPT, "max_tokens": 3}
    assert fleet.on(0).post("/v1/completions", json=body).status_code == 200


def test_holds_of_an_engine_that_is_gone_for_good_are_voided_as_the_guide_says(
    fleet: Fleet, addresses: dict[str, str]
) -> None:
    """Only expired holds, and only holds of that engine, are voided."""
    machine, (said,) = fleet.machines[0], re.findall(r"`chorale (.+) ENGINE_ID`", guide())
    command = [sys.executable, "-m", "server.cli.main", *said.split(), "gone"]
    command += ["--url", machine.base_url, "--admin-key", machine.admin_key]
    url = next(address for address in addresses.values() if address.startswith("postgresql"))
    database = sa.create_engine(url)
    kinds = {"expired": ("gone", 1), "young": ("gone", 1 << 50), "other's": ("there", 1)}
    with database.begin() as conn:
        like = conn.execute(sa.select(holds).limit(1)).mappings().one()
        for request_id, (engine_id, expires_at_ms) in kinds.items():
            changed = {"state": "open", "resolved_at_ms": None, "expires_at_ms": expires_at_ms}
            conn.execute(
                sa.insert(holds),
                dict(like) | changed | {"request_id": request_id, "engine_id": engine_id},
            )
    subprocess.run(command, check=True)
    with database.begin() as conn:
        ours = sa.select(holds.c.request_id, holds.c.state)
        states = dict(conn.execute(ours.where(holds.c.request_id.in_(kinds))).all())
        conn.execute(sa.delete(holds).where(holds.c.request_id.in_(kinds)))
    database.dispose()
    assert states == {"expired": "voided", "young": "open", "other's": "open"}


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy here")
def test_through_the_balancer_a_rolling_restart_cuts_nothing_and_costs_nobody(
    fleet: Fleet, tmp_path: Path
) -> None:
    tenant = fleet.machines[0].tenant("balanced")
    streams, stopping = Streams(), threading.Event()
    with balanced(fleet, tmp_path) as url, ThreadPoolExecutor(4) as pool:
        headers = {"authorization": f"Bearer {tenant.api_key}"}

        def keep_asking() -> None:
            with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
                while not stopping.is_set():
                    streams.ask(client, fleet.machines[0].model)

        for _ in range(4):
            pool.submit(keep_asking)
        try:
            for machine in fleet.machines:
                wait_for_more(streams)
                machine.terminate()
                assert machine.wait_gone() == 0
                wait_for_more(streams)
                machine.start()
        finally:
            stopping.set()
        for path in ("/metrics", "/admin/v1/tenants", "/%61dmin/v1/tenants"):
            assert httpx.get(url + path).status_code == 404
        assert httpx.get(f"{url}/health").status_code == 200
    assert streams.num_cut == 0
    # A machine refuses requests between the signal and the end of its listening; clients ask again,
    # and pay once.
    assert set(streams.statuses) <= {200, 503}
    fleet.check_billed(tenant, streams.num_whole, streams.num_tokens)


def wait_for_more(streams: Streams) -> None:
    num_whole = streams.num_whole
    Stack.wait(lambda: streams.num_whole >= num_whole + 8)


@contextmanager
def balanced(fleet: Fleet, folder: Path) -> Iterator[str]:
    """Run a balancer with haproxy.cfg and the machines' addresses in it; yield its address."""
    port = free_port()
    text = (DEPLOY / "haproxy.cfg").read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    for machine in fleet.machines:
        text = text.replace(f"{machine.name}:8000", f"127.0.0.1:{machine.port}")
    (folder / "haproxy.cfg").write_text(text)
    balancer = subprocess.Popen(("haproxy", "-f", str(folder / "haproxy.cfg")))
    try:
        Stack.wait(lambda: _listens(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        balancer.terminate()
        balancer.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
