"""Uploads over HTTP, without a socket and with an engine whose verdicts the tests set."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry.errors import StorageError
from registry.ref import BaseRef
from registry.storage.free_space import WorkDir
from registry.storage.storage import folder_of
from registry.uploads.parts import pending_bytes
from registry.uploads.proof import Proof
from server.adapters.prover import Prover
from server.adapters.spool import MAX_PARTS, MAX_PARTS_PER_TENANT, Spool
from server.api.endpoints import uploads as routes
from server.api.gateway import Gateway
from server.billing.prices import DEFAULT_PRICES, add_price
from server.billing.rating import monthly_storage_nanousd
from server.database.clock import now_ms
from tests.registry.factories import PresignedFolder
from tests.registry.fake_disk import FakeDisk
from tests.server.in_process import InProcess, User

ADAPTER = Path(__file__).parents[3] / "demo" / "adapters" / "json"
FILES = {
    name: (ADAPTER / name).read_bytes()
    for name in ("adapter_config.json", "adapter_model.safetensors")
}
DECLARED = {
    name: {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    for name, data in FILES.items()
}


class FakeEngine:
    """An engine that answers with `proof`, but not while `is_held`."""

    def __init__(self) -> None:
        self.proof = Proof(verdict="passed", device_bytes=4096)
        self.is_held = False

    async def prove(self, base: BaseRef, adapter: object, path: Path, alone: bool) -> Proof:
        while self.is_held:
            await asyncio.sleep(0.001)
        return self.proof


class Client:
    """A user's client of a running gateway."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http

    async def create(self, path: str = "adapters/one/uploads", **body: Any) -> httpx.Response:
        return await self.http.post(f"/v1/{path}", json={"files": DECLARED, **body})

    async def send(self, upload: dict[str, Any]) -> None:
        for name, data in FILES.items():
            answer = await self.http.put(f"/v1/uploads/{upload['id']}/files/{name}", content=data)
            assert answer.status_code == 200, answer.text

    async def complete(self, upload: dict[str, Any]) -> httpx.Response:
        return await self.http.post(f"/v1/uploads/{upload['id']}/complete")

    async def make(self, *path: str, **body: Any) -> dict[str, Any]:
        """An upload that has its files."""
        upload = (await self.create(*path, **body)).json()
        await self.send(upload)
        return upload

    async def show(self, upload: dict[str, Any]) -> dict[str, Any]:
        return (await self.http.get(f"/v1/uploads/{upload['id']}")).json()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(
    product: InProcess, acme: User, engine: FakeEngine, monkeypatch, tmp_path: Path
) -> AsyncIterator[Client]:
    """The user's client of the gateway, whose prover runs."""
    monkeypatch.setattr(routes, "_PROOF_WAIT_S", 10.0)
    prover = Prover(
        product.gateway.database,
        product.gateway.catalog,
        product.gateway.storage,
        engine.prove,
        is_ready=lambda: True,
        work=WorkDir(tmp_path / "proofs"),
        poll_s=0.01,
        notice_s=0.01,
    )
    product.gateway = replace(product.gateway, prover=prover)
    task = asyncio.create_task(prover.run())
    headers = {"authorization": f"Bearer {acme.api_key}"}
    transport = httpx.ASGITransport(product.app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", headers=headers
    ) as http:
        yield Client(product.gateway, http)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_an_upload_is_proved_and_shown_with_its_passport_and_version(client: Client) -> None:
    created = await client.create(alias="prod")
    assert created.status_code == 201
    upload = created.json()
    assert (upload["state"], upload["transfer"], upload["dry_run"]) == (
        "open",
        "gateway",
        False,
    )
    await client.send(upload)
    answer = await client.complete(upload)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["state"], body["adapter"], body["version"]["version"]) == (
        "complete",
        "one",
        1,
    )
    assert body["passport"]["canary"]["passed"] is True
    assert body["version"]["passport"]["canary"]["device_bytes"] == 4096
    size_bytes = body["version"]["size_bytes"]
    monthly = monthly_storage_nanousd(size_bytes, DEFAULT_PRICES)
    for shown in (body["passport"], body["version"]["passport"]):
        assert shown["storage_nanousd_per_month"] == monthly > 0
    assert await client.show(upload) == body
    assert (await client.complete(upload)).json() == body


async def test_an_adapter_that_the_engine_refuses_is_a_400_and_its_report_stays(
    client: Client, engine: FakeEngine
) -> None:
    engine.proof = Proof(verdict="no_effect", message="It changes nothing.")
    upload = await client.make()
    for _ in range(2):
        answer = await client.complete(upload)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["message"]) == ("no_effect", "It changes nothing.")
    shown = await client.show(upload)
    assert (shown["state"], shown["error"]["code"], shown["version"]) == (
        "failed",
        "no_effect",
        None,
    )
    assert shown["passport"]["canary"]["passed"] is False
    assert (await client.http.get("/v1/adapters/one")).status_code == 404


async def test_a_proof_that_takes_long_is_a_202_that_says_when_to_ask_again(
    client: Client, engine: FakeEngine, monkeypatch
) -> None:
    engine.is_held = True
    monkeypatch.setattr(routes, "_PROOF_WAIT_S", 0.01)
    upload = await client.make()
    for _ in range(2):
        answer = await client.complete(upload)
        assert (answer.status_code, answer.json()["state"]) == (202, "proving")
        assert answer.headers["retry-after"] == "5"
    assert (await client.http.get("/v1/adapters/one")).status_code == 404
    engine.is_held = False
    monkeypatch.setattr(routes, "_PROOF_WAIT_S", 10.0)
    assert (await client.complete(upload)).status_code == 200


async def test_a_dry_run_answers_with_the_passport_and_leaves_nothing(
    client: Client, product: InProcess
) -> None:
    created = await client.create("adapters:validate")
    assert created.status_code == 201, created.text
    upload = created.json()
    assert (upload["dry_run"], upload["adapter"], upload["alias"]) == (True, None, None)
    await client.send(upload)
    body = (await client.complete(upload)).json()
    assert (body["state"], body["version"], body["passport"]["canary"]) == (
        "complete",
        None,
        None,
    )
    assert body["passport"]["rank"] >= 1
    assert (await client.http.get("/v1/adapters")).json()["data"] == []
    refused = await client.create("adapters:validate", alias="prod")
    assert refused.status_code == 400
    objects = product.gateway.settings.data_dir / "objects"
    assert [path for path in objects.rglob("*") if path.is_file()] == []


async def test_parts_beyond_the_places_on_disk_are_a_503_and_a_tenant_has_only_some(
    client: Client, acme: User
) -> None:
    upload = (await client.create()).json()
    url = f"/v1/uploads/{upload['id']}/files/adapter_config.json"

    async def send_beside(**parts: int) -> httpx.Response:
        """Send a part while each tenant has the given number of parts under way."""
        async with AsyncExitStack() as places:
            for tenant_id, count in parts.items():
                for _ in range(count):
                    await places.enter_async_context(client.gateway.spool.place(tenant_id, 1))
            return await client.http.put(url, content=FILES["adapter_config.json"])

    others = {f"other-{i}": 1 for i in range(MAX_PARTS)}
    for parts in ({acme.tenant_id: MAX_PARTS_PER_TENANT}, others):
        answer = await send_beside(**parts)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "uploads_busy")
        assert answer.headers["retry-after"] == "2"
    assert (await send_beside(one=8, two=8)).status_code == 200


async def test_a_compressed_part_is_refused(client: Client) -> None:
    upload = (await client.create()).json()
    url = f"/v1/uploads/{upload['id']}/files/adapter_config.json"
    headers = {"content-encoding": "gzip"}
    answer = await client.http.put(url, content=FILES["adapter_config.json"], headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "compressed_body")


@pytest.mark.parametrize("value", ["bytes 0-9/10", "bytes 5-2/10", "bytes 6-10/10", "garbage"])
async def test_a_part_whose_range_and_body_differ_is_refused(client: Client, value: str) -> None:
    upload = (await client.create()).json()
    url = f"/v1/uploads/{upload['id']}/files/adapter_config.json"
    answer = await client.http.put(url, content=b"12345", headers={"content-range": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Range")


async def test_a_part_that_gives_way_is_told_to_be_sent_again(client: Client, acme: User) -> None:
    upload = (await client.create()).json()
    url = f"/v1/uploads/{upload['id']}/files/adapter_config.json"
    has_begun = asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        has_begun.set()
        await asyncio.Event().wait()
        yield b""

    sending = asyncio.create_task(client.http.put(url, content=stalled()))
    await has_begun.wait()
    async with AsyncExitStack() as places:
        for tenant_id in (acme.tenant_id, *(f"other-{i}" for i in range(MAX_PARTS - 1))):
            await places.enter_async_context(client.gateway.spool.place(tenant_id, 1))
        answer = await sending
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "uploads_busy")
    assert (await client.http.put(url, content=FILES["adapter_config.json"])).status_code == 200


async def test_a_part_that_would_take_the_disks_reserve_is_a_507_before_it_is_read(
    client: Client, product: InProcess
) -> None:
    disk = FakeDisk(free_bytes=1000)
    product.gateway.space.look = disk
    upload = (await client.create()).json()
    url = f"/v1/uploads/{upload['id']}/files/adapter_config.json"
    read = []

    async def body() -> AsyncIterator[bytes]:
        read.append(1)
        yield FILES["adapter_config.json"]

    answer = await client.http.put(url, content=body())
    assert (answer.status_code, read) == (507, [])
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_storage", "no_room")
    assert answer.headers["retry-after"] == "30"
    disk.free_bytes = disk.size_bytes
    await client.send(upload)
    disk.free_bytes = 1000
    assert (await client.complete(upload)).status_code == 507
    assert (await client.show(upload))["state"] == "open"
    disk.free_bytes = 64 << 20
    assert (await client.complete(upload)).status_code == 200


async def test_parts_of_unfinished_uploads_count_until_they_are_discarded(
    client: Client, product: InProcess, tmp_path: Path
) -> None:
    size_bytes = sum(map(len, FILES.values()))
    database = product.gateway.database
    small = Spool(
        WorkDir(tmp_path / "parts"),
        folder_of(product.gateway.storage),
        lambda tenant_id: database.read(lambda conn: pending_bytes(conn, tenant_id)),
        max_pending_bytes=size_bytes,
        max_pending_share=1,
    )
    product.app.state.gateway = product.gateway = replace(product.gateway, spool=small)
    first, second = [(await client.create()).json() for _ in range(2)]
    await client.send(first)
    url = f"/v1/uploads/{second['id']}/files/adapter_config.json"
    refused = await client.http.put(url, content=FILES["adapter_config.json"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "no_room")
    await client.http.delete(f"/v1/uploads/{first['id']}")
    await client.send(second)
    assert (await client.complete(second)).status_code == 200


async def test_a_cancelled_upload_leaves_nothing_and_makes_room(
    client: Client, product: InProcess
) -> None:
    upload = await client.make()
    for _ in range(2):
        cancelled = await client.http.delete(f"/v1/uploads/{upload['id']}")
        assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert list(product.gateway.storage.list("")) == []
    refused = await client.complete(upload)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "upload_not_open")
    done = await client.make("adapters/two/uploads")
    assert (await client.complete(done)).status_code == 200
    kept = await client.http.delete(f"/v1/uploads/{done['id']}")
    assert kept.status_code == 409


class StoreWithoutParts(PresignedFolder):
    """A store that takes objects but fails when a multipart upload begins."""

    def begin_multipart(self, key: str) -> str:
        raise StorageError(key=key, reason="the store is down")


async def test_a_presigned_upload_that_the_store_cannot_offer_is_not_left_open(
    client: Client, product: InProcess, tmp_path: Path
) -> None:
    store = StoreWithoutParts(tmp_path / "other")
    product.app.state.gateway = product.gateway = replace(product.gateway, storage=store)
    for _ in range(product.gateway.registry_limits.max_open_uploads + 1):
        assert (await client.create(transfer="presigned")).status_code == 503
    assert (await client.create()).status_code == 201


async def test_a_version_for_another_base_is_proved_again_and_nothing_is_sent(
    client: Client, product: InProcess, engine: FakeEngine
) -> None:
    upload = await client.make()
    assert (await client.complete(upload)).status_code == 200
    bases = product.gateway.catalog.bases
    bases.replace(replace(next(iter(bases)), base_revision="f" * 64))
    engine.proof = Proof(verdict="passed", device_bytes=8192)
    again = await client.http.post("/v1/adapters/one/versions/1/prove", json={"alias": "prod"})
    assert (again.status_code, again.json()["state"]) == (202, "proving")
    version = (await client.complete(again.json())).json()["version"]
    assert (version["version"], version["base_revision"]) == (2, "f" * 64)
    assert version["passport"]["canary"]["device_bytes"] == 8192
    shown = (await client.http.get("/v1/adapters/one")).json()
    assert shown["aliases"] == {"latest": 2, "prod": 2}
    refused = await client.http.post("/v1/adapters/one/versions/2/prove", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "already_proved")


async def test_a_dry_run_costs_what_the_base_model_costs_that_its_tensors_fit(
    client: Client, product: InProcess
) -> None:
    bases = product.gateway.catalog.bases
    fitting = next(iter(bases))
    other = replace(fitting, model_id="other", path=Path("elsewhere"), modules={})
    bases.replace(replace(other, base_revision="f" * 64), fitting)
    prices = {"base": replace(DEFAULT_PRICES, storage_nanousd=7 * DEFAULT_PRICES.storage_nanousd)}
    prices["other"] = replace(DEFAULT_PRICES, storage_nanousd=0)
    for name, price in prices.items():
        now = now_ms()
        product.gateway.database.write_sync(
            lambda conn, name=name, price=price, now=now: add_price(
                conn, price, effective_at_ms=now, now_ms=now, base_model=name
            )
        )
    upload = await client.make("adapters:validate")
    body = (await client.complete(upload)).json()
    assert (upload["base_model"], body["base_model"]) == (None, "base")
    assert (body["state"], body["version"]) == ("complete", None)
    monthly = monthly_storage_nanousd(body["passport"]["size_bytes"], prices["base"])
    assert body["passport"]["storage_nanousd_per_month"] == monthly > 0


async def test_an_upload_names_its_base_model_and_its_version_says_which_it_is_for(
    client: Client, product: InProcess
) -> None:
    bases = product.gateway.catalog.bases
    first = next(iter(bases))
    twin = replace(first, model_id="twin", base_revision="f" * 64)
    bases.replace(replace(first, model_id="one-of-two", path=Path("elsewhere")), twin)
    for path in ("adapters/one/uploads", "adapters:validate"):
        refused = await client.create(path, base_model="gone")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "base_model")
        assert refused.json()["error"]["code"] == "unknown_base_model"
    unclear = await client.make(base_model=None)
    answer = await client.complete(unclear)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "base_model_unclear")
    upload = (await client.create(base_model="twin")).json()
    assert upload["base_model"] == "twin"
    await client.send(upload)
    version = (await client.complete(upload)).json()["version"]
    assert (version["base_model"], version["base_revision"]) == ("twin", "f" * 64)
    named = {"base_model": "one-of-two"}
    proving = await client.http.post("/v1/adapters/one/versions/1/prove", json=named)
    assert proving.json()["base_model"] == "one-of-two"
    version = (await client.complete(proving.json())).json()["version"]
    assert (version["version"], version["base_model"]) == (2, "one-of-two")
    bases.replace(twin)
    shown = (await client.http.get("/v1/adapters/one")).json()["latest"]
    assert (shown["base_model"], shown["is_servable"]) == (None, False)
