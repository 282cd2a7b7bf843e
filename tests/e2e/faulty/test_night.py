"""Three in the morning: for each fault an alert fires, and the operator's page says why.

The alerts are asked of a real Prometheus without the time that they must hold for, which
`tests/alerts.yaml` is about.
"""

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape

import httpx
import pytest
import yaml

from tests.e2e.faulty.conftest import World
from tests.e2e.prometheus import DEPLOY, Prometheus

RULES = {
    rule["alert"]: rule["expr"]
    for rule in yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"][0]["rules"]
}


@dataclass
class Night:
    """A stack, and who watches it."""

    world: World
    prometheus: Prometheus
    page: httpx.Client

    def wait(self, condition: Callable[[], object]) -> None:
        self.world.stack.wait(condition)

    def ask(self, model: str = "base") -> int:
        """The status of an answer."""
        return self.world.ask(model).status_code

    def fires(self, alert: str) -> bool:
        return self.prometheus.finds(RULES[alert])

    def shown(self) -> str:
        """The text of the operator's page."""
        answer = self.page.get("/console/operator")
        assert answer.status_code == 200, answer.text
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.text)).split())


@pytest.fixture(scope="module")
def night(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Night]:
    """A Prometheus and an operator's browser, who watch the stack."""
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{world.stack.port}")
    with (
        contextlib.closing(prometheus),
        httpx.Client(base_url=world.stack.base_url, timeout=60) as page,
    ):
        key, origin = {"key": world.stack.admin_key}, {"origin": world.stack.base_url}
        assert page.post("/console/sign-in", data=key, headers=origin).status_code == 303
        yield Night(world, prometheus, page)


def test_a_disk_that_is_nearly_full(night: Night) -> None:
    night.wait(lambda: night.fires("ChoraleDiskNearlyFull"))
    assert "are left for uploads and caches" in night.shown()


def test_a_ledger_that_is_locked(night: Night) -> None:
    locking = sqlite3.connect(night.world.stack.data_dir / "chorale.db", isolation_level=None)

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        with contextlib.closing(locking):
            locking.execute("BEGIN IMMEDIATE")
            yield

    check_outage(night, locked(), "The ledger cannot be written now", "ChoraleErrorsOfOurs")


def test_a_store_that_is_gone(night: Night) -> None:
    lora = night.world.make_lora()

    @contextlib.contextmanager
    def gone() -> Iterator[None]:
        night.world.s3.fail("unavailable")
        yield
        night.world.s3.clear()

    problem = "Adapters that could not be loaded"
    check_outage(night, gone(), problem, "ChoraleStoreFails", model=lora.name)


def test_limits_without_their_redis(night: Night) -> None:
    problem, alert = "Limits are not the shared ones", "ChoraleLimitsDegraded"
    night.wait(lambda: problem not in night.shown() and not night.fires(alert))
    night.world.redis.stop()
    night.wait(lambda: night.ask() == 200 and night.fires(alert))
    assert problem in night.shown()


def check_outage(
    night: Night,
    outage: contextlib.AbstractContextManager[None],
    problem: str,
    alert: str,
    model: str = "base",
) -> None:
    """Check that the alert fires and the page names the problem, while the model gets a 503."""
    night.wait(lambda: problem not in night.shown() and not night.fires(alert))
    with outage:
        night.wait(lambda: night.ask(model) == 503 and night.fires(alert))
        assert problem in night.shown()
    night.wait(lambda: night.ask(model) == 200)
    night.wait(lambda: problem not in night.shown())
