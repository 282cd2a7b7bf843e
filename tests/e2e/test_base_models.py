"""Several base models behind one gateway: each answers as it should, and none minds the others.

The supervisor, the gateway, the fetchers and the engines are real, and so are the models: that of
the demo, and a random one of another shape and vocabulary.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.billing.audit.run import audit
from server.database.database import Database
from server.launch.local_pool import engine_folders
from tests.e2e.conftest import DEMO
from tests.e2e.stack import FILES, Stack, Tenant, running
from tests.oracle import greedy, merged_model
from tests.tiny_models import save_adapter, save_model

MAX_TOKENS = 12
PROMPTS = [[5 + number, *range(10, 20 + 7 * number)] for number in range(4)]


@dataclass
class Pair:
    """A stack with two base models, a tenant, and its adapters by base model."""

    stack: Stack
    tenant: Tenant
    dirs: dict[str, Path]
    adapters: dict[str, dict[str, Path]]


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> Iterator[Pair]:
    dirs = {"base": DEMO / "model", "tiny": tiny_model}
    adapters = {
        "base": {"pirate": DEMO / "adapters" / "pirate"},
        "tiny": {"alpha": tiny_adapters["alpha"]},
    }
    models = [{"model": str(folder), "model_name": name} for name, folder in dirs.items()]
    with running(tmp_path_factory.mktemp("pair"), DEMO, models=models) as stack:
        tenant = stack.tenant("acme")
        wait_serving(stack, "base", "tiny")
        for of_base in adapters.values():
            for name, folder in of_base.items():
                tenant.push(name, folder)
        yield Pair(stack, tenant, dirs, adapters)


def models_of(stack: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.operator.get("/admin/v1/models").json()["data"]
    return found


def state_of(stack: Stack, name: str) -> str | None:
    """State of the base model that new requests for this name go to; None without any."""
    states = [it["state"] for it in models_of(stack) if it["name"] == name]
    return next((state for state in states if state != "leaving"), None)


def wait_serving(stack: Stack, *names: str) -> None:
    stack.wait(lambda: {state_of(stack, name) for name in names} == {"serving"})


def ask(tenant: Tenant, model: str, prompt: list[int], **options: Any) -> httpx.Response:
    body = {
        "model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0,
        "return_token_ids": True, **options,
    }  # fmt: skip
    return tenant.http.post("/v1/completions", json=body)


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def peft_answers(model_dir: Path, adapter_dir: Path | None) -> list[list[int]]:
    """The greedy answers to the prompts, each up to the model's own end token."""
    model = merged_model(model_dir, adapter_dir)
    end = model.generation_config.eos_token_id or 0
    return [greedy(model, prompt, MAX_TOKENS, eos_token_id=end) for prompt in PROMPTS]


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@dataclass
class Load:
    """Requests that are sent one after another by several clients until the block ends."""

    tenant: Tenant
    models: list[str]
    answers: list[httpx.Response] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(len(self.models))
        self._running = [self._pool.submit(self._send, model) for model in self.models]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for sender in self._running:
            sender.result()
        self._pool.shutdown()

    def wait_for(self, count: int) -> None:
        """Wait until so many more requests have been answered."""
        goal = len(self.answers) + count
        Stack.wait(lambda: len(self.answers) >= goal)

    def _send(self, model: str) -> None:
        while not self._over.is_set():
            self.answers.append(ask(self.tenant, model, PROMPTS[0]))


def check_books(stack: Stack, tenant: Tenant, least: int) -> None:
    """Check that all is settled, and that journal, ledger and statements agree."""
    stack.settled_events(least)
    folders = engine_folders(stack.data_dir)
    database = Database(data_dir=stack.data_dir, exclusive=False)
    try:
        report = database.read_sync(lambda conn: audit(conn, engine_dirs=folders))
    finally:
        database.close()
    assert report.findings == []


def test_every_model_answers_as_peft_does_with_its_own_adapters(pair: Pair) -> None:
    wanted = {
        model: peft_answers(pair.dirs[base], folder)
        for base, adapters in pair.adapters.items()
        for model, folder in ({base: None} | adapters).items()
    }
    asked = [(model, number) for model in wanted for number in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(pool.map(lambda it: tokens_of(ask(pair.tenant, it[0], PROMPTS[it[1]])), asked))
    wrong = [it for it, ids in zip(asked, got, strict=True) if ids != wanted[it[0]][it[1]]]
    assert not wrong
    assert len({tuple(ids[0]) for ids in wanted.values()}) == len(wanted), "all matter"


def test_a_tenant_sees_every_model_and_which_base_an_adapter_is_for(pair: Pair) -> None:
    found = {it["id"]: it["parent"] for it in pair.tenant.http.get("/v1/models").json()["data"]}
    assert found == {"base": None, "tiny": None, "pirate": "base", "alpha": "tiny"}
    shown = pair.tenant.http.get("/v1/adapters/alpha").json()
    assert shown["latest"]["base_model"] == "tiny"
    texts = {
        model: pair.tenant.http.post("/tokenize", json={"model": model, "prompt": "Ahoy"}).json()
        for model in ("base", "pirate", "tiny", "alpha")
    }
    assert texts["base"]["tokens"] == texts["pirate"]["tokens"] != texts["tiny"]["tokens"]
    assert texts["tiny"]["tokens"] == texts["alpha"]["tokens"]


def test_an_adapter_for_another_base_model_is_refused_by_name(pair: Pair) -> None:
    folder = pair.adapters["tiny"]["alpha"]
    contents = {name: (folder / name).read_bytes() for name in FILES}
    refused = pair.tenant.upload("wrong", contents, {"base_model": "base"})
    assert error_of(refused) == (400, "target_mismatch", "adapter_model.safetensors")
    unknown = pair.tenant.upload("wrong", contents, {"base_model": "nobody"})
    assert error_of(unknown) == (400, "unknown_base_model", "base_model")


def test_an_engine_that_is_killed_ends_its_own_models_streams_and_no_others(pair: Pair) -> None:
    stack, tenant = pair.stack, pair.tenant
    home = next(Path(it["home"]) for it in models_of(stack) if it["name"] == "tiny")
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}
    ended: dict[str, list[str]] = {"base": [], "tiny": []}
    begun = {model: threading.Event() for model in ended}

    def stream(model: str) -> None:
        with tenant.http.stream("POST", "/v1/completions", json=body | {"model": model}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    begun[model].set()
                    chunk = json.loads(line[6:])
                    said = chunk["error"]["code"] if "error" in chunk else None
                    reasons = [said] if said else [c["finish_reason"] for c in chunk["choices"]]
                    ended[model] += [reason for reason in reasons if reason]

    with ThreadPoolExecutor(2) as pool:
        running_streams = [pool.submit(stream, model) for model in ended]
        for event in begun.values():
            assert event.wait(60)
        os.kill(_engine_of(stack, home), signal.SIGKILL)
        for each in running_streams:
            each.result()
    assert ended == {"base": ["length"], "tiny": ["engine_unavailable"]}
    wait_serving(stack, "tiny")
    assert tokens_of(ask(tenant, "alpha", PROMPTS[1]))
    check_books(stack, tenant, 1)


def _engine_of(stack: Stack, home: Path) -> int:
    for pid in stack.pids():
        if f"-m engine {home}/" in Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace(
            "\0", " "
        ):
            return pid
    raise LookupError(home)


def test_a_drained_model_says_so_and_serves_again_when_it_is_told_to(pair: Pair) -> None:
    stack, tenant = pair.stack, pair.tenant
    stack.operator.post("/admin/v1/models/tiny/drain").raise_for_status()
    refused = ask(tenant, "alpha", PROMPTS[0])
    assert error_of(refused)[:2] == (503, "model_drained")
    assert int(refused.headers["retry-after"]) > 0
    assert tokens_of(ask(tenant, "pirate", PROMPTS[0])), "the other goes on"
    stack.wait(lambda: state_of(stack, "tiny") == "drained")
    stack.operator.post("/admin/v1/models/tiny/resume").raise_for_status()
    wait_serving(stack, "tiny")
    assert tokens_of(ask(tenant, "alpha", PROMPTS[0]))


def test_a_model_is_added_replaced_and_removed_under_load_and_no_request_fails(
    pair: Pair, tmp_path: Path
) -> None:
    stack, tenant = pair.stack, pair.tenant
    first = save_model(tmp_path / "first", seed=7)
    body: dict[str, Any] = {"name": "extra", "model": str(first)}
    assert stack.operator.post("/admin/v1/models", json=body).status_code == 202
    wait_serving(stack, "extra")
    tenant.push("hers", save_adapter(first, tmp_path / "hers", r=4, seed=3), base_model="extra")
    before = {it["home"] for it in models_of(stack) if it["name"] == "extra"}
    with Load(tenant, ["extra", "extra", "hers", "pirate"]) as load:
        load.wait_for(8)
        # The same weights in another form: adapters stay, answers may differ.
        body["settings"] = {"quantization": "int8"}
        stack.operator.post("/admin/v1/models", json=body).raise_for_status()

        def is_replaced() -> bool:
            found = {it["home"]: it for it in models_of(stack) if it["name"] == "extra"}
            gone = before.isdisjoint(home for home, it in found.items() if it["engines"])
            return gone and state_of(stack, "extra") == "serving"

        stack.wait(is_replaced)
        load.wait_for(8)
    assert {answer.status_code for answer in load.answers} == {200}
    check_books(stack, tenant, len(load.answers))

    stack.operator.delete("/admin/v1/models/extra").raise_for_status()
    stack.wait(lambda: state_of(stack, "extra") is None)
    assert error_of(ask(tenant, "extra", PROMPTS[0])) == (404, "model_not_found", "model")
    assert error_of(ask(tenant, "hers", PROMPTS[0])) == (404, "model_not_servable", "model")
    check_books(stack, tenant, len(load.answers))


def test_a_model_that_cannot_be_served_says_why_and_the_others_serve(pair: Pair) -> None:
    stack = pair.stack
    body = {"name": "nothing", "model": "/no/such/folder"}
    stack.operator.post("/admin/v1/models", json=body).raise_for_status()
    stack.wait(lambda: state_of(stack, "nothing") == "failed")
    (problem,) = [it["problem"] for it in models_of(stack) if it["name"] == "nothing"]
    assert "/no/such/folder" in problem
    assert tokens_of(ask(pair.tenant, "base", PROMPTS[0]))
    stack.operator.delete("/admin/v1/models/nothing").raise_for_status()
    refused = stack.operator.post("/admin/v1/models", json=body | {"settings": {"quantisation": 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "settings.quantisation"


def test_a_model_that_nobody_asks_for_sleeps_and_a_request_wakes_it(
    tmp_path: Path, tiny_model: Path
) -> None:
    models = [
        {"model": str(DEMO / "model"), "model_name": "base"},
        {"model": str(tiny_model), "model_name": "tiny", "sleep_after_s": 1.0},
        {"model": str(tiny_model), "model_name": "curt", "sleep_after_s": 1.0,
         "wake_timeout_s": 0.0},
    ]  # fmt: skip
    with running(tmp_path / "stack", DEMO, models=models) as stack:
        tenant = stack.tenant("acme")
        wait_serving(stack, "base")
        stack.wait(lambda: {state_of(stack, name) for name in ("tiny", "curt")} == {"asleep"})
        stack.wait(lambda: not any(it["engines"] for it in models_of(stack)[1:]))
        with Load(tenant, ["tiny", "tiny", "base"]) as load:
            load.wait_for(6)
        assert {answer.status_code for answer in load.answers} == {200}
        refused = ask(tenant, "curt", PROMPTS[0])
        assert error_of(refused)[:2] == (503, "model_waking")
        time.sleep(min(1.0, float(refused.headers["retry-after"])))
        stack.wait(lambda: ask(tenant, "curt", PROMPTS[0]).status_code == 200)
        stack.wait(lambda: state_of(stack, "tiny") == "asleep")
        check_books(stack, tenant, len(load.answers) + 1)
