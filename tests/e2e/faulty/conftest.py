"""A stack whose surroundings can be made to fail: its store, its Redis, and what watches it.

The store is S3 over HTTP, behind a proxy that fails on demand.
"""

import json
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from registry.storage.free_space import volume_of
from tests import needs
from tests.e2e.folder_fixture import folder_fixture
from tests.e2e.stack import FILES, Stack, Tenant, running
from tests.faulty_s3 import CREDENTIALS, FaultyS3, faulty_s3
from tests.redis_server import RedisServer
from tests.server.traces.collector import Collector, collecting

BUCKET = "store-that-fails"
PREFIX = "prefix"
FETCH_TIMEOUT_S = 5.0
NUM_LORAS = 9
"""Adapters that are made for all tests of this folder: each test takes new ones."""
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

    def __init__(
        self,
        stack: Stack,
        s3: FaultyS3,
        redis: RedisServer,
        collector: Collector,
        source: Path,
        folder: Path,
    ) -> None:
        self.stack, self.s3, self.redis, self.collector = stack, s3, redis, collector
        self.tenant: Tenant = stack.tenant("acme", requests_per_minute=1_000_000)
        self._cold = [self._upload(source, folder / f"lora-{i}", i) for i in range(NUM_LORAS)]
        stack.make_cold()
        self.resident = self.make_lora()
        self.said = {model: self.stream(model) for model in ("base", self.resident.name)}

    def make_lora(self) -> Lora:
        """Return an adapter that was proved and that this engine has never heard of."""
        return self._cold.pop()

    def _upload(self, source: Path, folder: Path, number: int) -> Lora:
        # Each adapter has other values, so that each is an object of its own.
        _copy_adapter(source, folder, factor=1 + number / 64)
        self.tenant.push(folder.name, folder)
        digest = self.tenant.http.get(f"/v1/adapters/{folder.name}").json()["latest"]["digest"]
        key = f"{PREFIX}/tenants/{self.tenant.tenant_id}/{digest}"
        return Lora(folder.name, folder, key)

    def ask(
        self, model: str, *, stream: bool = False, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        body = {
            "model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0, "stream": stream,
        }  # fmt: skip
        answers: list[httpx.Response] = []

        def is_counted() -> bool:
            """Limits begin empty, and refuse, whenever a busy machine's Redis answers late."""
            answers.append(self.tenant.http.post("/v1/completions", json=body, headers=headers))
            return answers[-1].status_code != 429

        self.stack.wait(is_counted)
        return answers[-1]

    def stream(self, model: str) -> list[int]:
        """Return the tokens of a whole streamed answer."""
        body = {
            "model": model, "prompt": "the quick brown fox", "max_tokens": 60, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        ids: list[int] = []

        def is_counted() -> bool:
            with self.tenant.http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        ids.extend(json.loads(line[6:])["choices"][0]["token_ids"])
            return answer.status_code != 429

        self.stack.wait(is_counted)
        assert len(ids) == 60
        return ids

    @contextmanager
    def others_going_on(self) -> Iterator[ThreadPoolExecutor]:
        """Stream from the base model and a resident adapter all the while, and check that answers
        stay the same. Yields the pool of their threads, which has one more.
        """
        over = threading.Event()

        def keep_asking(model: str) -> None:
            assert self.stream(model) == self.said[model]
            while not over.wait(0.05):
                assert self.stream(model) == self.said[model]

        with ThreadPoolExecutor(len(self.said) + 1) as pool:
            asking = [pool.submit(keep_asking, model) for model in self.said]
            try:
                yield pool
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


@folder_fixture
def world(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The stack, whose disk has a fiftieth left above its reserve."""
    needs.redis()
    folder = tmp_path_factory.mktemp("faulty")
    volume = volume_of(folder)
    with (
        faulty_s3(BUCKET) as s3,
        collecting() as collector,
        # The path of a socket may have 107 bytes.
        tempfile.TemporaryDirectory() as short,
        pytest.MonkeyPatch.context() as patch,
    ):
        environment = CREDENTIALS | {"AWS_ENDPOINT_URL": s3.url}
        for name, value in environment.items():
            patch.setenv(name, value)
        redis = RedisServer(Path(short)).start()
        with running(
            folder / "stack", tiny_model, storage=f"s3://{BUCKET}/{PREFIX}",
            redis_url=redis.url, otlp_endpoint=collector.url, environment=environment,
            disk_reserve_bytes=max(0, volume.free_bytes - volume.size_bytes // 50),
            fetch_timeout_s=FETCH_TIMEOUT_S, first_token_timeout_s=50.0,
        ) as stack:  # fmt: skip
            yield World(stack, s3, redis, collector, tiny_adapters["alpha"], folder)
        redis.stop()


def _copy_adapter(source: Path, folder: Path, *, factor: float) -> None:
    """Copy an adapter's folder with every weight times `factor`."""
    config, weights = FILES
    folder.mkdir()
    (folder / config).write_bytes((source / config).read_bytes())
    tensors = load_file(source / weights)
    scaled = {name: (tensor * factor).astype(tensor.dtype) for name, tensor in tensors.items()}
    save_file(scaled, folder / weights)
