"""Base models beside each other: what a stack with several must do, wherever their engines run."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.bill import check_audit
from tests.e2e.stack import Stack, Tenant, process_of
from tests.e2e.streams import StreamThread
from tests.oracle import greedy, merged_model
from tests.tiny_models import save_adapter, save_model

DEMO = Path(__file__).parents[2] / "demo"
MAX_TOKENS = 12
PROMPTS = [[5 + number, *range(10, 20 + 7 * number)] for number in range(4)]


@dataclass
class Pair:
    """A running stack with two base models, and a tenant with an adapter for each.

    dirs: folders by base model.   adapters: folders by base model and adapter.
    """

    stack: Stack
    tenant: Tenant
    dirs: dict[str, Path]
    adapters: dict[str, dict[str, Path]]

    @classmethod
    def on(
        cls, stack: Stack, dirs: dict[str, Path], adapters: dict[str, dict[str, Path]]
    ) -> "Pair":
        """Push the adapters to a stack as soon as it serves both base models."""
        wait_serving(stack, *dirs)
        tenant = stack.tenant("acme")
        for of_base in adapters.values():
            for name, folder in of_base.items():
                tenant.push(name, folder)
        return cls(stack, tenant, dirs, adapters)


def tables(dirs: dict[str, Path], **more: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the `models` of the settings.   more: further settings by base model."""
    return [
        {"model": str(folder), "model_name": name, **more.get(name, {})}
        for name, folder in dirs.items()
    ]


# ---- what the operator sees ----


def models_of(stack: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.operator.get("/admin/v1/models").json()["data"]
    return found


def homes_of(stack: Stack, name: str) -> list[Path]:
    """Return the folders of the base models of this name, former ones included."""
    return [Path(it["home"]) for it in models_of(stack) if it["name"] == name]


def state_of(stack: Stack, name: str) -> str | None:
    """State of the base model that new requests for this name go to; None without any."""
    states = [it["state"] for it in models_of(stack) if it["name"] == name]
    return next((state for state in states if state != "leaving"), None)


def wait_serving(stack: Stack, *names: str) -> None:
    stack.wait(lambda: {state_of(stack, name) for name in names} == {"serving"})


# ---- requests ----


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


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@dataclass
class Load:
    """Requests that are sent one after another by a client for each model until the block ends.

    options: further fields of every request.
    """

    tenant: Tenant
    models: list[str]
    options: dict[str, Any] = field(default_factory=dict)
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
            self.answers.append(ask(self.tenant, model, PROMPTS[0], **self.options))


# ---- what must hold ----


def check_books(stack: Stack, least: int) -> None:
    """Check that all is settled, and that journal, ledger and statements agree."""
    stack.settled_events(least)
    check_audit(stack)


def check_answers(pair: Pair) -> None:
    """Check that each base model, alone and with its adapters, answers as PEFT does."""
    wanted = {
        model: _peft_answers(pair.dirs[base], folder)
        for base, adapters in pair.adapters.items()
        for model, folder in ({base: None} | adapters).items()
    }
    asked = [(model, number) for model in wanted for number in range(len(PROMPTS))]
    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(pool.map(lambda it: tokens_of(ask(pair.tenant, it[0], PROMPTS[it[1]])), asked))
    wrong = [it for it, ids in zip(asked, got, strict=True) if ids != wanted[it[0]][it[1]]]
    assert not wrong
    assert len({tuple(ids[0]) for ids in wanted.values()}) == len(wanted), "all matter"


def _peft_answers(model_dir: Path, adapter_dir: Path | None) -> list[list[int]]:
    """Return the greedy answers to the prompts, each up to the model's own end token."""
    model = merged_model(model_dir, adapter_dir)
    end = model.generation_config.eos_token_id or 0
    return [greedy(model, prompt, MAX_TOKENS, eos_token_id=end) for prompt in PROMPTS]


def check_a_killed_engine(pair: Pair, victim: str) -> None:
    """Kill the engine of `victim`: its stream ends with an error, and the other one as it should.

    The engine comes back and serves its adapter.
    """
    stack, tenant = pair.stack, pair.tenant
    (home,) = homes_of(stack, victim)
    streams = {model: StreamThread(tenant, model=model, max_tokens=400) for model in pair.dirs}
    (config,) = home.glob("*engine.json")
    os.kill(process_of(config), signal.SIGKILL)
    for stream in streams.values():
        stream.join(60)
    ended = {model: it.got.error or it.got.finish_reason for model, it in streams.items()}
    assert ended == dict.fromkeys(pair.dirs, "length") | {victim: "engine_unavailable"}
    wait_serving(stack, victim)
    for adapter in pair.adapters[victim]:
        assert tokens_of(ask(tenant, adapter, PROMPTS[1]))
    check_books(stack, 1)


def check_replacing(pair: Pair, folder: Path, **settings: Any) -> None:
    """Add a base model, replace it and remove it under load, without a request that fails.

    folder: for the model.   settings: those of the model.
    """
    stack, tenant = pair.stack, pair.tenant
    model = save_model(folder / "first", seed=7)
    body: dict[str, Any] = {"name": "extra", "model": str(model), "settings": settings}
    assert stack.operator.post("/admin/v1/models", json=body).status_code == 202
    wait_serving(stack, "extra")
    tenant.push("hers", save_adapter(model, folder / "hers", r=4, seed=3), base_model="extra")
    (before,) = homes_of(stack, "extra")
    others = [name for of_base in pair.adapters.values() for name in of_base]
    with Load(tenant, ["extra", "extra", "hers", others[0]]) as load:
        load.wait_for(8)
        # The same weights in another form: adapters stay, answers may differ.
        body["settings"] = settings | {"quantization": "int8"}
        stack.operator.post("/admin/v1/models", json=body).raise_for_status()
        stack.wait(lambda: _is_replaced(stack, "extra", before))
        load.wait_for(8)
    assert {answer.status_code for answer in load.answers} == {200}
    check_books(stack, len(load.answers))

    stack.operator.delete("/admin/v1/models/extra").raise_for_status()
    stack.wait(lambda: state_of(stack, "extra") is None)
    assert error_of(ask(tenant, "extra", PROMPTS[0])) == (404, "model_not_found", "model")
    assert error_of(ask(tenant, "hers", PROMPTS[0])) == (404, "model_not_servable", "model")
    check_books(stack, len(load.answers))


def _is_replaced(stack: Stack, name: str, former: Path) -> bool:
    """Whether no engine is left in the former home, and the name is served."""
    found = [it for it in models_of(stack) if it["name"] == name]
    is_gone = not any(it["engines"] for it in found if Path(it["home"]) == former)
    return is_gone and state_of(stack, name) == "serving"


def check_waking(stack: Stack, tenant: Tenant, sleeper: str, other: str) -> None:
    """Wake a base model by requests while another is under load: none fails, and it sleeps again.

    sleeper: a base model with a short `sleep_after_s`.
    """
    stack.wait(lambda: is_asleep(stack, sleeper))
    with Load(tenant, [other, sleeper, sleeper]) as load:
        load.wait_for(6)
        Stack.wait(lambda: state_of(stack, sleeper) == "serving")
        load.wait_for(6)
    assert {answer.status_code for answer in load.answers} == {200}
    stack.wait(lambda: is_asleep(stack, sleeper))
    check_books(stack, len(load.answers))


def is_asleep(stack: Stack, name: str) -> bool:
    """Whether a base model sleeps and has no engine that takes requests."""
    engines = [it["engines"] for it in models_of(stack) if it["name"] == name]
    return state_of(stack, name) == "asleep" and not any(engines)
