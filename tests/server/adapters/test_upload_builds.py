"""UploadBuilds: one build per upload, one at a time per tenant, few at once, few that wait."""

import asyncio
import threading

import pytest

from registry.errors import Fault
from server.adapters.upload_builds import MAX_RUNNING, MAX_WAITING, UploadBuilds
from server.api.errors import answer_of


class Checks:
    """Blocks the threads that build until `go` is set, and records which ran at the same time."""

    def __init__(self):
        self.go = threading.Event()
        self.calls = []
        self.inside = []
        self.beside = []
        self._lock = threading.Lock()

    def complete(self, tenant_id, upload_id):
        with self._lock:
            self.calls.append(upload_id)
            self.inside.append(tenant_id)
            self.beside.append(list(self.inside))
        assert self.go.wait(20)
        with self._lock:
            self.inside.remove(tenant_id)
        return upload_id


def ask(builds, *uploads):
    return [asyncio.create_task(builds.build(t, u)) for t, u in uploads]


async def settled():
    """Let every task run until it waits for a thread."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_upload_that_is_asked_for_often_is_completed_once():
    checks = Checks()
    builds = UploadBuilds(checks.complete)
    asked = ask(builds, *[("a", "up_1")] * (MAX_RUNNING + MAX_WAITING + 9))
    await settled()
    asked.pop().cancel()
    checks.go.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert (set(answers), checks.calls) == ({"up_1"}, ["up_1"])


async def test_one_that_nobody_waits_for_any_more_goes_on():
    checks = Checks()
    builds = UploadBuilds(checks.complete)
    (asked,) = ask(builds, ("a", "up_1"))
    await settled()
    asked.cancel()
    await settled()
    again = ask(builds, ("a", "up_1"))
    await settled()
    checks.go.set()
    assert await asyncio.gather(*again) == ["up_1"]
    assert checks.calls == ["up_1"]


async def test_few_run_at_once_and_of_one_tenant_one():
    checks = Checks()
    checks.go.set()
    uploads = [(tenant, f"up_{i}") for i in range(6) for tenant in "abcdef"]
    assert len(await asyncio.gather(*ask(UploadBuilds(checks.complete), *uploads))) == len(uploads)
    assert max(map(len, checks.beside)) <= MAX_RUNNING
    assert all(len(set(tenants)) == len(tenants) for tenants in checks.beside)


async def test_one_tenants_many_leave_places_for_the_others():
    checks = Checks()
    builds = UploadBuilds(checks.complete)
    many = ask(builds, *[("a", f"up_{i}") for i in range(9)])
    other = ask(builds, ("b", "up_b"))
    while len(checks.calls) < 2:
        await asyncio.sleep(0.001)
    inside = sorted(checks.inside)
    checks.go.set()
    await asyncio.gather(*many, *other)
    assert inside == ["a", "b"]


async def test_more_than_may_wait_are_refused_and_told_when_to_ask_again():
    checks = Checks()
    builds = UploadBuilds(checks.complete)
    asked = ask(builds, *[("a", f"up_{i}") for i in range(MAX_RUNNING + MAX_WAITING)])
    await settled()
    with pytest.raises(Fault) as caught:
        await builds.build("b", "up_b")
    told = answer_of(caught.value)
    assert (told.status, told.headers["retry-after"]) == (503, "2")
    checks.go.set()
    await asyncio.gather(*asked)
    assert await builds.build("b", "up_b") == "up_b"


async def test_another_tenants_completion_is_not_joined():
    checks = Checks()
    checks.go.set()
    await asyncio.gather(*ask(UploadBuilds(checks.complete), ("a", "up_1"), ("b", "up_1")))
    assert len(checks.calls) == 2
