"""Two gateway processes of one machine on one port, with PostgreSQL and Redis and two engines."""

import concurrent.futures
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from server.database.tables import leases
from tests import needs
from tests.e2e.limited import Machine, check, check_budget
from tests.e2e.stack import Stack, Tenant
from tests.e2e.streams import PLAIN, StreamThread, wait_until_ready
from tests.redis_server import RedisServer

GATEWAYS = ("gateway", "gateway-2")


@pytest.fixture(scope="module")
def machine(
    make_postgres: Callable[[str], str], tiny_model: Path, tmp_path_factory: Any
) -> Iterator[Machine]:
    needs.redis()
    with tempfile.TemporaryDirectory() as short:
        redis, url = RedisServer(Path(short)).start(), make_postgres("template1")
        shared = {
            "database_url": url, "redis_url": redis.url,
            "fake_engine": True, "gateways": 2, "engines": 2, "max_num_seqs": 64,
            "max_model_len": 512, "redis_deadline_s": 2.0, "drain_timeout_s": 20.0,
        }  # fmt: skip
        stack = Stack(tmp_path_factory.mktemp("machine"), tiny_model, **shared)
        database = sa.create_engine(sa.engine.make_url(url))
        try:
            stack.start(FAKE_STEP_S="0.02")
            stack.wait(lambda: serving(stack) == set(GATEWAYS))
            wait_until_ready(stack, 2)
            yield Machine(stack, redis, database)
        finally:
            stack.stop()
            database.dispose()
            redis.stop()


@pytest.fixture
def stack(machine: Machine) -> Stack:
    return machine.stack


def serving(stack: Stack) -> set[str]:
    """Names of the gateways that a scrape tells of."""
    return set(figures(stack, "chorale_request_moves_total"))


def figures(stack: Stack, name: str) -> dict[str, float]:
    """Figures of a metric by gateway, over all other labels, as one scrape shows them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(
        httpx.get(f"{stack.base_url}/metrics", **PLAIN).text
    ):
        for sample in family.samples:
            if sample.name == name:
                gateway = sample.labels.get("gateway", "")
                found[gateway] = found.get(gateway, 0.0) + sample.value
    return found


def holder(stack: Stack, stream: StreamThread) -> str:
    """Name of the gateway that has a stream's connection."""
    connection = stream.answer.extensions["network_stream"]
    port = connection.get_extra_info("client_addr")[1]
    for name in (*GATEWAYS, "gateway-3"):
        try:
            if has_connection(stack.pid(name), port):
                return name
        except LookupError:
            continue
    return ""


def has_connection(pid: int, port: int) -> bool:
    """Whether a process has the server's end of a connection from this port of 127.0.0.1."""
    rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    inodes = {row.split()[9] for row in rows if row.split()[2].endswith(f":{port:04X}")}
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(path))
        except FileNotFoundError:
            continue
    return any(f"socket:[{inode}]" in links for inode in inodes)


def streams_on(tenant: Tenant, names: tuple[str, ...], max_tokens: int) -> dict[str, StreamThread]:
    """A stream at each of these gateways, which have it by chance."""
    found: dict[str, StreamThread] = {}
    while set(found) < set(names):
        stream = StreamThread(tenant, max_tokens=max_tokens)
        found.setdefault(holder(tenant.stack, stream), stream)
    return found


def test_both_take_part_in_one_limit_and_one_scrape_tells_of_both(
    machine: Machine, stack: Stack
) -> None:
    """Both engines serve, and each one's journal is settled once."""
    tenant = stack.tenant("limited", requests_per_minute=20)
    before = figures(stack, "chorale_http_requests_total")
    answers = machine.run(tenant, 60)
    check(answers, 20)
    assert sum(got.status == 200 for got in answers) >= 20, "and no fewer"
    after = figures(stack, "chorale_http_requests_total")
    share = {name: after[name] - before.get(name, 0.0) for name in GATEWAYS}
    assert min(share.values()) > 0
    assert sum(share.values()) >= 60
    assert figures(stack, "chorale_gateways_missing") == {"": 0.0}
    assert figures(stack, "chorale_engine_ready") == {"": 2.0}, "each engine is there once"
    assert machine.num_engines_of(tenant) == 2
    with machine.database.connect() as conn:
        names = sa.select(leases.c.name).where(leases.c.name.like("settler/%"))
        assert len(conn.scalars(names).all()) == 2


def test_both_spend_one_budget_to_its_last_token(machine: Machine) -> None:
    check_budget(machine, count=40, num_tokens=900)


@pytest.mark.parametrize("fault", ["wiped", pytest.param("frozen", marks=pytest.mark.soak)])
def test_no_more_is_admitted_when_redis_is(fault: str, machine: Machine, stack: Stack) -> None:
    """Requests are sent all the time; tests/server/limits has every order of faults of Redis.

    A Redis that freezes and comes back may let the amount pass twice more.
    """
    tenant = stack.tenant(f"while-{fault}", requests_per_minute=30)
    answers = machine.run(tenant, 40)
    machine.redis.wipe() if fault == "wiped" else machine.redis.freeze()
    # Redis is frozen for 30 seconds, in which no request is kept waiting.
    ends_at = time.monotonic() + (30 if fault == "frozen" else 0)
    answers += machine.run(tenant, 30)
    while time.monotonic() < ends_at:
        answers += machine.run(tenant, 20)
    assert {got.headers.get("x-chorale-limiter") for got in answers} >= {"degraded"}
    machine.redis.thaw()
    answers += machine.run(tenant, 30)
    check(answers, 30, upsets=2 if fault == "frozen" else 0)


def test_a_killed_gateway_takes_nothing_from_its_neighbour_and_bills_nothing_of_its_own(
    stack: Stack,
) -> None:
    tenant = stack.tenant("survives")
    streams = streams_on(tenant, GATEWAYS, 150)
    stack.kill("gateway")
    assert httpx.get(f"{stack.base_url}/health").status_code == 200
    kept = streams["gateway-2"].usage["x_chorale"]["cost_nanousd"]
    assert kept > 0
    streams["gateway"].join(30)
    assert not streams["gateway"].got.is_whole
    stack.wait(lambda: serving(stack) == set(GATEWAYS))
    ids = {name: stream.got.events[0]["id"] for name, stream in streams.items()}
    stack.wait(lambda: charged(stack, ids["gateway"]) == 0)
    stack.wait(lambda: charged(stack, ids["gateway-2"]) == kept)


def charged(stack: Stack, request_id: str) -> int | None:
    """The cost of a request in all by the export, corrections included; None if it is not there."""
    lines = stack.operator.get("/admin/v1/usage/export?format=jsonl").text.splitlines()
    own = [e for e in map(json.loads, lines) if e["request_id"] == request_id.removeprefix("cmpl-")]
    return sum(int(e["amount_nanousd"]) for e in own) if own else None


def test_gateways_are_replaced_one_after_another_and_no_answer_is_cut_off(stack: Stack) -> None:
    tenant = stack.tenant("rolls")
    before = {stack.pid(name) for name in GATEWAYS}
    streams = streams_on(tenant, GATEWAYS, 300)
    os.kill(stack.pids()[0], signal.SIGUSR2)
    statuses: list[int] = []
    headers, body = tenant.headers, {"model": "base", "prompt": [5], "max_tokens": 3}
    url = f"{stack.base_url}/v1/completions"
    with (
        httpx.Client(headers=headers, **PLAIN) as kept,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        # Of a client that has just come each is on a connection of its own.
        new = partial(httpx.post, url, json=body, headers=headers, **PLAIN)
        while not is_replaced(stack, before):
            asked = [pool.submit(ask) for ask in 4 * (new, partial(kept.post, url, json=body))]
            statuses += [each.result().status_code for each in asked]
    assert {stream.usage["completion_tokens"] for stream in streams.values()} == {300}
    assert set(statuses) == {200}
    stack.wait(lambda: len(serving(stack)) == 2)


def is_replaced(stack: Stack, before: set[int]) -> bool:
    return not before & set(stack.pids()) and len(serving(stack)) == 2


def test_the_port_refuses_connections_once_the_machine_stops(stack: Stack) -> None:
    stream = StreamThread(stack.tenant("lasts"), max_tokens=200)
    os.kill(stack.pids()[0], signal.SIGTERM)

    def is_refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", stack.port)) != 0

    stack.wait(is_refused)
    assert stream.usage
