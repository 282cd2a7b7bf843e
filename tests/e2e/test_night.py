"""Three in the morning: for each fault an alert fires, and the operator's page says why.

The alerts are asked of a real Prometheus without the time that they must hold for, which
`tests/alerts.yaml` is about.
"""

import contextlib
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import httpx
import pytest
import yaml

from bench.faulty_s3 import CREDENTIALS, FaultyS3, faulty_s3
from registry.free_space import volume_of
from tests import needs
from tests.e2e.prometheus import DEPLOY, Prometheus
from tests.e2e.stack import Stack, running
from tests.redis_server import RedisServer

BUCKET = "night"
RULES = {
    rule["alert"]: rule["expr"]
    for rule in yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"][0]["rules"]
}


@dataclass
class Night:
    """A stack with one tenant, and who watches it."""

    stack: Stack
    prometheus: Prometheus
    page: httpx.Client

    def ask(self, model: str = "base") -> int:
        """The status of an answer."""
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 1}
        return self.stack.tenants[0].http.post("/v1/completions", json=body).status_code

    def fires(self, alert: str) -> bool:
        return self.prometheus.finds(RULES[alert])

    def shown(self, path: str = "") -> str:
        """The text of a page of the operator's."""
        answer = self.page.get(f"/console/operator{path}")
        assert answer.status_code == 200, answer.text
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.text)).split())


@contextlib.contextmanager
def watching(stack: Stack, folder: Path) -> Iterator[Night]:
    """Watch a stack.   folder: for Prometheus; it is made."""
    folder.mkdir()
    with (
        contextlib.closing(Prometheus(folder, f"127.0.0.1:{stack.port}")) as prometheus,
        httpx.Client(base_url=stack.base_url, timeout=60) as page,
    ):
        key, origin = {"key": stack.admin_key}, {"origin": stack.base_url}
        assert page.post("/console/sign-in", data=key, headers=origin).status_code == 303
        yield Night(stack, prometheus, page)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    needs.redis()
    # The path of a socket may have 107 bytes.
    with tempfile.TemporaryDirectory() as short:
        server = RedisServer(Path(short)).start()
        yield server
        server.stop()


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    with faulty_s3(BUCKET) as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": s3.url}).items():
            patch.setenv(name, value)
        yield s3


@pytest.fixture(scope="module")
def night(
    redis: RedisServer,
    s3: FaultyS3,
    tiny_model: Path,
    tiny_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Night]:
    """A stack whose disk has a fiftieth left above its reserve, and whose adapter is cold."""
    needs.program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("night")
    volume = volume_of(folder)
    with running(
        folder / "stack", tiny_model, storage=f"s3://{BUCKET}", redis_url=redis.url,
        disk_reserve_bytes=max(0, volume.free_bytes - volume.size_bytes // 50),
        fetch_timeout_s=3.0, environment=CREDENTIALS | {"AWS_ENDPOINT_URL": s3.url},
    ) as stack:  # fmt: skip
        tenant = stack.tenant("acme", requests_per_minute=1_000_000)
        tenant.push("alpha", tiny_adapters["alpha"])
        stack.restart_cold()
        with watching(stack, folder / "prometheus") as night:
            yield night


def test_a_disk_that_is_nearly_full(night: Night) -> None:
    night.stack.wait(lambda: night.fires("ChoraleDiskNearlyFull"))
    assert "are left for uploads and caches" in night.shown()


def test_a_ledger_that_is_locked(night: Night) -> None:
    problem, alert = "The ledger cannot be written now", "ChoraleErrorsOfOurs"
    assert night.ask() == 200
    assert problem not in night.shown()
    assert not night.fires(alert)
    locking = sqlite3.connect(night.stack.data_dir / "chorale.db", isolation_level=None)
    with contextlib.closing(locking):
        locking.execute("BEGIN IMMEDIATE")
        night.stack.wait(lambda: night.ask() == 503 and night.fires(alert))
        assert problem in night.shown()
    night.stack.wait(lambda: night.ask() == 200)
    night.stack.wait(lambda: problem not in night.shown())


def test_a_store_that_is_gone(night: Night, s3: FaultyS3) -> None:
    problem, alert = "Adapters that could not be loaded", "ChoraleStoreFails"
    assert night.ask() == 200
    assert problem not in night.shown()
    assert not night.fires(alert)
    s3.fail("unavailable")
    night.stack.wait(lambda: night.ask("alpha") == 503 and night.fires(alert))
    assert problem in night.shown()
    s3.clear()
    night.stack.wait(lambda: night.ask("alpha") == 200)
    night.stack.wait(lambda: problem not in night.shown())


def test_limits_without_their_redis(night: Night, redis: RedisServer) -> None:
    problem, alert = "Limits are not the shared ones", "ChoraleLimitsDegraded"
    night.stack.wait(lambda: problem not in night.shown())
    assert not night.fires(alert)
    redis.stop()
    night.stack.wait(lambda: night.ask() == 200 and night.fires(alert))
    assert problem in night.shown()


def test_an_engine_that_is_slow(tiny_model: Path, tmp_path: Path) -> None:
    needs.program("prometheus", "prometheus")
    problem, alert = (
        "first tokens took more than 2 s, most of it for: prefill.",
        "ChoraleFirstTokensLate",
    )
    environment = {"FAKE_STEP_S": "2.2"}
    with (
        running(
            tmp_path / "stack", tiny_model, fake_engine=True, max_model_len=256,
            environment=environment,
        ) as stack,
        watching(stack, tmp_path / "prometheus") as night,
    ):  # fmt: skip
        stack.tenant("acme")
        assert problem not in night.shown()
        assert not night.fires(alert)
        stack.wait(lambda: night.ask() == 200 and night.fires(alert))
        stack.wait(lambda: problem in night.shown())
        slowest = night.shown("/requests")
        assert re.search(r"[2-9](\.\d+)? s to the first token", slowest)
        assert re.search(r"prefill [2-9](\.\d+)? s", slowest)
