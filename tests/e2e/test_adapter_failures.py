"""A store that fails: requests for its adapters get a typed error, other requests are not affected.

The product's store is S3 over HTTP, behind a proxy that fails on demand.
"""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save_file

from bench.faulty_s3 import CREDENTIALS, FaultyS3, Kind, faulty_s3
from tests.e2e.stack import FILES, Stack, Tenant, running
from tests.tiny_models import save_adapter

BUCKET = "store-that-fails"
PREFIX = "prefix"
FETCH_TIMEOUT_S = 3.0
NUM_LORAS = 17
"""Adapters that are made for all tests of this file: each test takes new ones."""
RECOVERY_S = 90.0
"""Longest time an adapter may be refused after its store recovers: pauses between tries grow."""


@dataclass
class Lora:
    """An adapter of the tenant. key: key of its object in the bucket."""

    name: str
    folder: Path
    key: str


class World:
    """A stack whose object store can be made to fail, and one tenant."""

    def __init__(self, stack: Stack, s3: FaultyS3, source: Path, folder: Path) -> None:
        self.stack = stack
        self.s3 = s3
        self.tenant: Tenant = stack.tenant("acme")
        self._cold = [self._upload(source, folder / f"lora-{i}", i) for i in range(NUM_LORAS)]
        stack.restart_cold()
        self.resident = self.make_lora()
        self.said = {model: self.stream(model) for model in ("base", self.resident.name)}

    def make_lora(self) -> Lora:
        """Return an adapter that was proved and that this engine has never heard of."""
        return self._cold.pop()

    def _upload(self, source: Path, folder: Path, number: int) -> Lora:
        # Each adapter has other values, so that each is an object of its own.
        copy_adapter(source, folder, factor=1 + number / 64)
        self.tenant.push(folder.name, folder)
        digest = self.tenant.http.get(f"/v1/adapters/{folder.name}").json()["latest"]["digest"]
        key = f"{PREFIX}/tenants/{self.tenant.tenant_id}/{digest}"
        return Lora(folder.name, folder, key)

    def ask(self, model: str, *, stream: bool = False) -> httpx.Response:
        return complete(self.tenant, model, stream=stream)

    def stream(self, model: str) -> list[int]:
        """Return the tokens of a whole streamed answer."""
        body = {
            "model": model, "prompt": "the quick brown fox", "max_tokens": 60, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        ids = []
        with self.tenant.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line[6:])["choices"][0]["token_ids"]
        assert len(ids) == 60
        return ids

    @contextmanager
    def others_going_on(self) -> Iterator[None]:
        """Stream from the base model and a resident adapter all the while, and check that answers
        stay the same.
        """
        over = threading.Event()

        def keep_asking(model: str) -> None:
            assert self.stream(model) == self.said[model]
            while not over.is_set():
                assert self.stream(model) == self.said[model]

        with ThreadPoolExecutor(len(self.said)) as pool:
            asking = [pool.submit(keep_asking, model) for model in self.said]
            try:
                yield
            finally:
                over.set()
        for one in asking:
            one.result()

    def wait_served(self, lora: Lora) -> None:
        """Wait until the adapter serves again; until then its requests get errors."""
        self.stack.wait(lambda: self.ask(lora.name).status_code == 200, RECOVERY_S)

    def residency(self, lora: Lora) -> dict[str, object]:
        data = self.stack.operator.get("/admin/v1/residency").json()["data"]
        return next(entry for entry in data if lora.key.endswith(str(entry["object_key"])))

    def figure(self, name: str, **labels: str) -> float:
        """Return a figure of /metrics as Prometheus reads it, summed over series with `labels`."""
        text = self.stack.operator.get("/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    def check_bill(self, lora: Lora, causes: set[str]) -> None:
        """Check that the adapter's failed requests are in the ledger and cost nothing."""

        def failed() -> list[dict[str, object]]:
            lines = self.stack.operator.get("/admin/v1/usage/export?format=jsonl").text.splitlines()
            events = [json.loads(line) for line in lines]
            own = [event for event in events if event["model"] == lora.name]
            return [event for event in own if event["finish_reason"] == "error"]

        self.stack.wait(failed)
        for event in failed():
            assert event["stop_cause"] in causes
            assert (event["amount_nanousd"], event["completion_tokens"]) == (0, 0)
            assert event["is_failed"]


@pytest.fixture(scope="module")
def world(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with faulty_s3(BUCKET) as s3, pytest.MonkeyPatch.context() as patch:
        environment = CREDENTIALS | {"AWS_ENDPOINT_URL": s3.url}
        for name, value in environment.items():
            patch.setenv(name, value)
        with running(
            tmp_path_factory.mktemp("faulty"), tiny_model, storage=f"s3://{BUCKET}/{PREFIX}",
            environment=environment, fetch_timeout_s=FETCH_TIMEOUT_S, first_token_timeout_s=50.0,
        ) as stack:  # fmt: skip
            loras = tmp_path_factory.mktemp("loras")
            yield World(stack, s3, tiny_adapters["alpha"], loras)


@pytest.fixture(autouse=True)
def _well_again(world: World) -> Iterator[None]:
    yield
    world.s3.clear()


@pytest.mark.parametrize("fault", ["unavailable", "truncate", "short", "reset", "wrong_bytes"])
def test_a_fault_that_passes_is_nothing_to_the_customer(world: World, fault: Kind) -> None:
    lora = world.make_lora()
    world.s3.fail(fault, key=lora.key, times=1)
    assert world.ask(lora.name).status_code == 200
    assert world.residency(lora)["tier"] == "device"


@pytest.mark.parametrize("fault", ["unavailable", "truncate", "reset", "hang", "stall"])
def test_a_store_that_is_down_is_a_503_until_it_is_well(world: World, fault: Kind) -> None:
    lora = world.make_lora()
    before = world.figure("chorale_http_requests_total", status="503")
    with world.others_going_on():
        world.s3.fail(fault, key=lora.key)
        for stream in (False, True):
            answer = world.ask(lora.name, stream=stream)
            assert answer.status_code == 503, answer.text
            check_error(answer, "adapter_loading")
            assert int(answer.headers["retry-after"]) >= 1
        assert world.figure("chorale_http_requests_total", status="503") == before + 2
        found = world.residency(lora)
        assert (found["tier"], found["size_bytes"] > 0) == ("failed", True)
        assert found["error"], "the operator is told more than the customer"
        world.s3.clear()
        world.wait_served(lora)
    assert world.residency(lora)["error"] is None
    world.check_bill(lora, {"adapter_loading"})


def test_an_object_that_is_damaged_or_lost_is_a_502_until_it_is_uploaded_again(
    world: World,
) -> None:
    damaged, lost = world.make_lora(), world.make_lora()
    with world.others_going_on():
        world.s3.fail("wrong_bytes", key=damaged.key)
        boto3.client("s3").delete_object(Bucket=BUCKET, Key=lost.key)
        for lora, code in ((damaged, "adapter_corrupt"), (lost, "adapter_missing")):
            check_broken(world.ask(lora.name), code)
            check_broken(world.ask(lora.name, stream=True), code)
            assert world.residency(lora)["tier"] == "failed"
        world.s3.clear()
        for lora in (damaged, lost):
            world.tenant.push(lora.name, lora.folder)
    for lora in (damaged, lost):
        world.wait_served(lora)
    world.check_bill(damaged, {"adapter_corrupt"})
    world.check_bill(lost, {"adapter_missing"})


def test_a_failure_is_remembered_and_not_asked_of_the_store_by_every_request(world: World) -> None:
    lora = world.make_lora()
    boto3.client("s3").delete_object(Bucket=BUCKET, Key=lora.key)
    check_broken(world.ask(lora.name), "adapter_missing")
    asked = world.s3.count(lora.key)
    for _ in range(10):
        check_broken(world.ask(lora.name), "adapter_missing")
    assert world.s3.count(lora.key) < asked + 10


def test_requests_that_wait_for_a_slow_adapter_are_served_by_one_load(world: World) -> None:
    lora = world.make_lora()
    before = world.figure("chorale_adapter_tier_loads_total", tier="device")
    world.s3.fail("delay", key=lora.key, times=1, seconds=1.0)
    with world.others_going_on(), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(world.ask, [lora.name] * 8))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1

    def is_counted() -> bool:
        return world.figure("chorale_adapter_tier_loads_total", tier="device") == before + 1

    world.stack.wait(is_counted)  # the engine's figures are a quarter of a second old


def test_a_fetcher_that_is_killed_is_asked_again_by_a_request_that_waits(world: World) -> None:
    lora = world.make_lora()
    asked = world.s3.count(lora.key)
    world.s3.fail("hang", key=lora.key, times=1)
    with world.others_going_on(), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.ask, lora.name)
        world.stack.wait(lambda: world.s3.count(lora.key) > asked)
        world.stack.kill("fetcher")
        assert waiting.result().status_code == 200
    assert world.residency(lora)["tier"] == "device"


@pytest.fixture(scope="module")
def cramped(
    world: World, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenant]:
    """A tenant of a stack on the same store, with a small arena, a short timeout, and float16."""
    with running(
        tmp_path_factory.mktemp("cramped"), tiny_model, storage=f"s3://{BUCKET}/cramped",
        dtype="float16", arena_bytes=1 << 20, first_token_timeout_s=1.0,
    ) as stack:  # fmt: skip
        yield stack.tenant("globex")


def test_an_adapter_on_its_way_for_longer_than_the_first_token_may_take_is_a_503(
    world: World, cramped: Tenant, tiny_adapters: dict[str, Path]
) -> None:
    cramped.push("slow", tiny_adapters["beta"])
    world.s3.fail("hang", key="cramped/")
    cramped.stack.restart_cold()
    late = complete(cramped, "slow")
    assert late.status_code == 503, late.text
    check_error(late, "adapter_loading")
    assert int(late.headers["retry-after"]) >= 1
    assert complete(cramped, "base").status_code == 200
    world.s3.clear()
    cramped.stack.wait(lambda: complete(cramped, "slow").status_code == 200, RECOVERY_S)


def test_an_adapter_larger_than_the_arena_is_refused_when_it_is_proved(
    cramped: Tenant, tiny_model: Path, tmp_path: Path
) -> None:
    folder = save_adapter(tiny_model, tmp_path / "large", seed=1, r=256)
    refused = upload(cramped, "large", folder)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_served")
    assert "does not fit into the arena" in refused.json()["error"]["message"]
    assert cramped.http.get("/v1/adapters/large").status_code == 404
    assert complete(cramped, "base").status_code == 200


def test_an_adapter_out_of_range_of_the_engines_numbers_is_refused_when_it_is_checked(
    cramped: Tenant, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "loud"
    copy_adapter(tiny_adapters["alpha"], folder, factor=1e9)
    refused = upload(cramped, "loud", folder)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "value_too_large")
    assert cramped.http.get("/v1/adapters/loud").status_code == 404


def test_an_activated_lora_wants_its_invocation_tokens(
    cramped: Tenant, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "activated"
    save_adapter(tiny_model, folder, seed=2, alora_invocation_tokens=[70, 71])
    cramped.push("activated", folder)
    refused = complete(cramped, "activated", prompt=[50, 70, 51, 71])
    check_refused(refused, "adapter_not_invoked")
    assert refused.json()["error"]["param"] == "prompt"
    assert complete(cramped, "activated", prompt=[50, 70, 71, 51]).status_code == 200


def upload(tenant: Tenant, name: str, folder: Path) -> httpx.Response:
    return tenant.upload(name, {file: (folder / file).read_bytes() for file in FILES})


def complete(
    tenant: Tenant, model: str, *, prompt: str | list[int] = "hello", stream: bool = False
) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": stream}
    return tenant.http.post("/v1/completions", json=body)


def copy_adapter(source: Path, folder: Path, *, factor: float) -> None:
    """Copy an adapter's folder with every weight times `factor`."""
    config, weights = FILES
    folder.mkdir()
    (folder / config).write_bytes((source / config).read_bytes())
    tensors = load_file(source / weights)
    scaled = {name: (tensor * factor).astype(tensor.dtype) for name, tensor in tensors.items()}
    save_file(scaled, folder / weights)


def check_error(answer: httpx.Response, code: str) -> None:
    """Check the error's code, and that its message does not tell where the object is."""
    error = answer.json()["error"]
    assert error["code"] == code
    assert "othing was billed" in error["message"]
    for secret in ("tenants/", "127.0.0.1", BUCKET):
        assert secret not in error["message"]


def check_refused(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 400, answer.text
    check_error(answer, code)


def check_broken(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 502, answer.text
    check_error(answer, code)
    assert answer.headers["x-should-retry"] == "false"
