"""A pool that grows and shrinks while it serves, and one started again with fewer engines."""

import contextlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.leaving import is_settled
from server.pool.files import members_path, read_members, wanted_path, write_wanted
from tests.e2e.stack import Stack, Tenant, running

SLOW = {"FAKE_STEP_S": "0.02"}
BODY = {"model": "base", "max_tokens": 60, "ignore_eos": True}


def states(stack: Stack) -> dict[str, str]:
    """Return the states of the engines that the gateway knows, by name."""
    answer = stack.operator.get("/admin/v1/engines")
    return {engine["name"]: engine["state"] for engine in answer.json()["data"]}


def figures(stack: Stack, name: str) -> dict[str, Any]:
    engines = stack.operator.get("/admin/v1/engines").json()["data"]
    return next(engine["figures"] or {} for engine in engines if engine["name"] == name)


def holds_by_state(stack: Stack) -> dict[str, int]:
    url = f"file:{stack.data_dir / 'chorale.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(url, uri=True)) as database:
        return dict(database.execute("SELECT state, count(*) FROM holds GROUP BY state"))


@dataclass
class Load:
    """Workers that send one request after the other. answers: status and body; 0: no answer."""

    tenant: Tenant
    answers: list[tuple[int, Any]] = field(default_factory=list)
    num_workers: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)

    def set_workers(self, count: int) -> None:
        """Set the number of workers. New ones begin at once; others end after their next answer."""
        self.num_workers = count
        for number in range(len(self._threads), count):
            self._threads.append(threading.Thread(target=self._work, args=(number,)))
            self._threads[-1].start()

    def _work(self, number: int) -> None:
        headers = {"authorization": f"Bearer {self.tenant.api_key}"}
        with httpx.Client(
            base_url=self.tenant.stack.base_url, headers=headers, timeout=60
        ) as client:
            for turn in range(10_000):
                if number >= self.num_workers:
                    return
                body = BODY | {"prompt": [10 + number, 10 + turn % 100, 5]}
                try:
                    answer = client.post("/v1/completions", json=body)
                    self.answers.append((answer.status_code, answer.json()))
                except (httpx.HTTPError, ValueError) as error:
                    self.answers.append((0, error))

    def stop(self) -> None:
        self.num_workers = 0
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def loaded(tenant: Tenant) -> Iterator[Load]:
    load = Load(tenant)
    try:
        yield load
    finally:
        load.stop()


def test_a_pool_grows_under_load_and_shrinks_again_and_no_request_notices(
    tmp_path: Path, tiny_model: Path
) -> None:
    pool = {"engines": 2, "max_engines": 3, "max_num_seqs": 4, "max_model_len": 512}
    with running(
        tmp_path / "stack", tiny_model, fake_engine=True, environment=SLOW, **pool
    ) as stack:
        stack.wait(lambda: states(stack) == {"engine": "ready", "engine-2": "ready"})
        with loaded(stack.tenant("acme")) as load:
            load.set_workers(11)
            stack.wait(lambda: states(stack).get("engine-3") == "ready")
            stack.wait(lambda: figures(stack, "engine-3")["completion_tokens"] > 0)
            load.set_workers(5)
            engine_pid = stack.pid("engine-3")
            write_wanted(wanted_path(stack.data_dir), 2)
            stack.wait(lambda: states(stack)["engine-3"] == "leaving")
            stack.wait(lambda: stack.pid("engine-3") != engine_pid)
            # A stand-in follows the engine and stays a member: holds there may still be open.
            stack.wait(lambda: is_retired(stack.pid("engine-3")))
            stack.wait(lambda: states(stack)["engine-3"] == "leaving")
            num_answers = len(load.answers)
            stack.wait(lambda: len(load.answers) > num_answers + 20)
        assert [answer for answer in load.answers if answer[0] != 200] == []
        events = stack.settled_events(len(load.answers))
        assert len(events) == len(load.answers)
        assert {event["completion_tokens"] for event in events} == {BODY["max_tokens"]}
        assert len({event["engine_id"] for event in events}) == 3, "all of them served"
        stack.wait(lambda: holds_by_state(stack) == {"posted": len(events)})
        stack.wait(lambda: figures(stack, "engine-3")["unsettled_records"] == 0)


def is_retired(pid: int) -> bool:
    return b"engine.retired" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_what_a_smaller_pool_does_not_start_again_is_billed_all_the_same(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The power fails while three engines serve, and only one is started again."""
    settings: dict[str, Any] = {
        "fake_engine": True, "environment": SLOW, "max_num_seqs": 4, "max_model_len": 512,
    }  # fmt: skip
    received: dict[int, int] = {}
    with running(tmp_path / "stack", tiny_model, engines=3, **settings) as stack:
        stack.wait(lambda: list(states(stack).values()) == ["ready"] * 3)
        tenant = stack.tenant("acme")
        threads = [threading.Thread(target=stream, args=(tenant, i, received)) for i in range(9)]
        for thread in threads:
            thread.start()
        stack.wait(lambda: len(received) == 9 and min(received.values()) > 2)
        stack.die()
        for thread in threads:
            thread.join(60)
    num_received = sum(received.values())

    with running(tmp_path / "stack", tiny_model, engines=1, **settings) as stack:
        stack.wait(lambda: holds_by_state(stack) == {"posted": 9})
        assert states(stack) == {"engine": "ready", "engine-2": "leaving", "engine-3": "leaving"}
        events = stack.settled_events(9)
        assert Counter(event["stop_cause"] for event in events) == {"engine_failure": 9}
        assert len({event["engine_id"] for event in events}) == 3
        assert sum(event["completion_tokens"] for event in events) >= num_received
        assert {event["amount_nanousd"] for event in events} == {0}
        answer = stack.client(tenant.api_key).post("/v1/completions", json=BODY | {"prompt": [5]})
        assert answer.status_code == 200
        names = [member.name for member in read_members(members_path(stack.data_dir))]
        assert names == ["engine", "engine-2", "engine-3"]
        assert not is_settled(stack.data_dir / "engine-3"), "a hold might still be open"


def stream(tenant: Tenant, number: int, received: dict[int, int]) -> None:
    """Count the tokens of a stream until it ends or breaks off."""
    body = BODY | {
        "prompt": [10 + number, 5], "max_tokens": 400, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {tenant.api_key}"}
    url = f"{tenant.stack.base_url}/v1/completions"
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                received[number] = received.get(number, 0) + len(choice["token_ids"])
