"""deploy/compose.yaml as it runs: two machines on one PostgreSQL, Redis and object store."""

import json
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import httpx

from tests.e2e.composed import Fleet, balanced
from tests.e2e.day import Customers, Kind, fates
from tests.e2e.oracle import TinyWorld, check_oracle
from tests.e2e.stack import Stack, Tenant
from tests.e2e.streams import engines, num_generated

PROMPT = [5, 6, 7]
ORDERLY: tuple[Kind, ...] = ("stream", "whole", "leaves")
NONE_IS_READY = "backend gateways has no server available!"


def test_adapters_uploaded_at_one_machine_are_served_by_both_engines_of_the_other(
    fleet: Fleet, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> None:
    """Adapters travel through the object store, and every request gets the tokens of PEFT."""
    first, second = fleet.machines
    # The list also has the other machine's engines.
    Stack.wait(lambda: [it["state"] for it in engines(second).values()].count("ready") == 2)
    before = num_generated(second)
    for name, folder in tiny_adapters.items():
        fleet.tenant.push(name, folder)
    at_second = replace(fleet.tenant, stack=second)
    check_oracle(TinyWorld(second, at_second, tiny_model, tiny_adapters))

    def have_served() -> list[str]:
        return [name for name, n in num_generated(second).items() if n > before.get(name, 0)]

    Stack.wait(lambda: len(have_served()) == 2)
    for machine in (first, second):
        engine = Path(f"/proc/{machine.pid('engine')}/environ").read_bytes()
        assert b"AWS_" not in engine
        assert b"CHORALE_" not in engine


def test_tokens_come_through_the_balancer_one_by_one(fleet: Fleet, tmp_path: Path) -> None:
    """A balancer that holds tokens back for 200 ms sends an answer in a few pieces."""
    tenant, model = fleet.machines[0].tenant("one-by-one"), fleet.machines[0].model
    with balanced(fleet.machines, tmp_path) as url:
        direct, through = (
            [num_pieces(port, tenant, model) for _ in range(2)]
            for port in (fleet.machines[0].port, httpx.URL(url).port)
        )
    assert max(through) > min(direct) / 8


def num_pieces(port: int, tenant: Tenant, model: str) -> int:
    """Return in how many pieces a client's socket gets an answer of 400 tokens."""
    body = {"model": model, "prompt": [7], "max_tokens": 400, "ignore_eos": True, "stream": True}
    body["speculation"] = "off"  # one token in an event
    headers = {"Authorization": f"Bearer {tenant.api_key}", "Connection": "close"}
    http = HTTPConnection("127.0.0.1", port, timeout=60)
    http.request("POST", "/v1/completions", json.dumps(body), headers)
    pieces = list(iter(lambda: http.sock.recv(1 << 16), b""))
    http.close()
    assert b"".join(pieces).count(b'"text"') >= 400
    return len(pieces)


def test_while_the_database_is_away_clients_are_told_so_through_the_balancer(
    fleet: Fleet, tmp_path: Path
) -> None:
    tenant = fleet.machines[0].tenant("no-ledger")
    body = {"model": fleet.machines[0].model, "prompt": PROMPT, "max_tokens": 1}
    log = tmp_path / "haproxy.log"

    def ask() -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=body, headers=tenant.headers, timeout=60)

    with balanced(fleet.machines, tmp_path) as url:
        Stack.wait(lambda: ask().status_code == 200)
        with fleet.services.database_away():
            answers = [ask()]
            # The first ones are asked before the balancer's checks fail, the last one after them.
            Stack.wait(lambda: answers.append(ask()) or NONE_IS_READY in log.read_text())
            answers.append(ask())
            told = {(a.status_code, a.json()["error"]["code"]) for a in answers}
            assert told == {(503, "metering_unavailable")}
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        Stack.wait(lambda: ask().status_code == 200)


def test_a_machine_is_restarted_and_nothing_is_cut_and_it_costs_nobody(
    fleet: Fleet, tmp_path: Path
) -> None:
    """The other serves on, and the restarted one has the data in its volume.

    fleet/test_day.py is the long form.
    """
    first, second = fleet.machines
    tenant = first.tenant("restarted")
    with balanced(fleet.machines, tmp_path) as url:
        through, at_first, at_second = (
            Customers(url, tenant, [first.model]),
            Customers(first.base_url, tenant, [first.model], 2, ORDERLY),
            Customers(second.base_url, tenant, [first.model], 2, ORDERLY),
        )
        with through, at_second:
            with at_first:
                for customers in (through, at_first, at_second):
                    customers.wait_for_more()
                first.terminate()
                assert first.wait_gone() == 0
                for customers in (through, at_second):
                    customers.wait_for_more()
            first.start()
            through.wait_for_more()
            for path in ("/metrics", "/admin/v1/tenants", "/console/operator"):
                assert httpx.get(url + path).status_code == 404
            assert httpx.get(f"{url}/health").status_code == 200
    assert through.count("broken") == at_first.count("broken") == 0, "what had begun has its end"
    # A machine refuses requests between the signal and the end of its listening; clients ask again,
    # and pay once.
    assert {seen.status for seen in through.seen} <= {200, 503}
    assert {seen.status for seen in at_first.seen} <= {200, 503, None}
    assert set(fates(at_second.seen)) <= {"whole 200", "left 200"}
    fleet.check_books(through, at_first, at_second)
    body = {"model": "alpha", "prompt": PROMPT, "max_tokens": 3}
    http = first.client(fleet.tenant.api_key)
    assert http.post("/v1/completions", json=body).status_code == 200
