"""A base model of the table in the running product, with what is done to its adapters there."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from server.billing.receipts.check import ReceiptCheck
from server.billing.receipts.signing import PublicKey
from server.client.files import SENT_FILES
from tests.e2e.base_models import is_asleep, models_of, state_of
from tests.e2e.stack import Stack, Tenant
from tests.pairs.covering import Case
from tests.pairs.models import Base, Models

SLEEP_AFTER_S = 1.0


@dataclass
class World:
    """name: of the base model.   asked: x-request-ids of answers, with their usage and digests."""

    case: Case
    name: str
    stack: Stack
    tenant: Tenant
    models: Models
    base: Base
    asked: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.tenant.http.post(path, json=body)
        assert answer.status_code == 200, (self.case, answer.text)
        found = answer.json()
        self.note(answer, found["usage"])
        return found

    def note(self, answer: httpx.Response, usage: dict[str, Any]) -> None:
        headers = answer.headers
        self.asked.append((headers["x-request-id"], usage, headers["x-chorale-adapter-digest"]))

    def check_bill(self) -> None:
        """Check that each answer has a receipt that is signed and adds up, of its own tokens."""
        public = self.stack.operator.get("/v1/receipts/keys").json()["data"]
        keys = [PublicKey(bytes.fromhex(key["public_key"])) for key in public]
        check = ReceiptCheck({key.key_id: key for key in keys})
        http = self.tenant.http
        receipts = []
        for request_id, usage, digest in self.asked:
            path = f"/v1/receipts/{request_id}"
            self.wait(lambda path=path: http.get(path).status_code == 200)
            receipt = http.get(path).json()["receipt"]
            billed = receipt["prompt_tokens"], receipt["completion_tokens"]
            assert billed == (usage["prompt_tokens"], usage["completion_tokens"]), self.case
            assert receipt["adapter_digest"] == digest, self.case
            assert receipt["amount_nanousd"] > 0
            receipts.append(receipt)
        for row, receipt in enumerate(sorted(receipts, key=lambda it: it["receipt_seq"])):
            check.add(row, receipt)
        check.finish()
        assert check.findings == [], self.case

    def wait(self, condition: Callable[[], object]) -> None:
        self.stack.wait(condition, 60)

    def wait_served(self) -> None:
        self.wait(lambda: state_of(self.stack, self.name) in ("serving", "asleep", "failed"))
        (entry,) = [it for it in models_of(self.stack) if it["name"] == self.name]
        assert not entry["problem"], entry

    def adapter(self, kind: str, seed: int = 7) -> Path:
        return self.models.adapter(self.case["layers"], kind, seed)


def push(world: World, name: str, folder: Path, base: str | None = None, **asked: Any) -> None:
    files = [file for file in SENT_FILES if (folder / file).is_file()]
    contents = {file: (folder / file).read_bytes() for file in files}
    answer = world.tenant.upload(name, contents, {"base_model": base or world.name, **asked})
    assert answer.status_code == 200, (world.case, name, answer.text)
    check_proof(answer.json()["version"]["passport"]["canary"])


def check_proof(canary: dict[str, Any]) -> None:
    """Check that the adapter was compared with its merged weights, and moves what it may."""
    assert canary["passed"], canary
    assert (canary["num_prompts"], canary["num_tokens"]) == (2, 8), canary
    assert canary["max_difference"] <= canary["tolerance"], canary
    assert canary["max_difference"] < canary["max_effect"] / 4, canary


# ---- deeds: each returns the model to ask, and the adapter's folder ----


def plain_push(world: World, kind: str) -> tuple[str, Path]:
    folder = world.adapter(kind)
    push(world, f"push-{kind}", folder)
    return f"push-{kind}", folder


def convert_and_push(world: World, kind: str) -> tuple[str, Path]:
    folder = world.adapter("converted")
    push(world, "converted", folder)
    return "converted", folder


def push_to_a_sleeper(world: World, kind: str) -> tuple[str, Path]:
    """The base model sleeps, and the proof wakes it."""
    world.wait(lambda: is_asleep(world.stack, world.name))
    folder = world.adapter(kind, seed=8)
    push(world, f"wake-{kind}", folder)
    return f"wake-{kind}", folder


def prove_on_a_second_base(world: World, kind: str) -> tuple[str, Path]:
    """The adapter is pushed to another base model first."""
    folder = world.models.adapter("experts", "attention" if kind == "plain" else kind, 9)
    name = f"second-{kind}"
    push(world, name, folder, base=world.stack.model)
    http = world.tenant.http
    begun = http.post(
        f"/v1/adapters/{name}/versions/1/prove", json={"base_model": world.name}
    ).json()

    def is_over() -> bool:
        return http.get(f"/v1/uploads/{begun['id']}").json()["state"] != "proving"

    world.wait(is_over)
    upload = http.get(f"/v1/uploads/{begun['id']}").json()
    assert upload["state"] == "complete", upload
    check_proof(upload["passport"]["canary"])
    return f"{name}@2", folder


def restart(world: World, kind: str) -> tuple[str, Path]:
    """The engines end and come back."""
    folder = world.adapter(kind, seed=10)
    push(world, f"again-{kind}", folder)
    (home,) = [m["home"] for m in models_of(world.stack) if m["name"] == world.name]
    for file in Path(home).glob("engine*.pid"):
        old = file.read_text()
        os.kill(int(old), signal.SIGKILL)
        world.wait(lambda file=file, old=old: file.read_text() != old)
    world.wait(lambda: _answers(world))
    return f"again-{kind}", folder


def roll_back(world: World, kind: str) -> tuple[str, Path]:
    """The alias goes back from version 2 to version 1."""
    name, folder = f"rolled-{kind}", world.adapter(kind, seed=11)
    push(world, name, folder)
    http = world.tenant.http
    assert http.put(f"/v1/adapters/{name}/aliases/live", json={"version": 1}).is_success
    push(world, name, world.adapter(kind, seed=12), alias="live")
    rolled = http.post(f"/v1/adapters/{name}/aliases/live/rollback")
    assert rolled.is_success, rolled.text
    return f"{name}@live", folder


DEEDS = {
    "push": plain_push,
    "convert": convert_and_push,
    "wake": push_to_a_sleeper,
    "prove again": prove_on_a_second_base,
    "restart": restart,
    "roll back": roll_back,
}


def _answers(world: World) -> bool:
    body = {"model": world.name, "prompt": [5, 6], "max_tokens": 1}
    return world.tenant.http.post("/v1/completions", json=body).status_code == 200
