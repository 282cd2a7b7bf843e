"""A shared adapter answers as for its owner; a pinned adapter is loaded before any request."""

from collections.abc import Iterator

import pytest

from tests.e2e.oracle import TinyWorld
from tests.e2e.stack import Tenant

ASK = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0}


@pytest.fixture
def friend(tiny: TinyWorld) -> Iterator[Tenant]:
    """A tenant that may use acme's adapter beta."""
    tenant = tiny.stack.tenant("hooli")
    assert tiny.tenant.http.put("/v1/adapters/beta/grants/hooli").is_success
    assert tenant.http.put("/v1/offers/acme/beta").is_success
    yield tenant
    assert tiny.tenant.http.delete("/v1/adapters/beta/grants/hooli").is_success


def test_a_shared_adapter_says_what_it_says_to_its_owner_and_its_user_pays(
    tiny: TinyWorld, friend: Tenant
) -> None:
    def ask(tenant: Tenant, model: str) -> tuple[str, str]:
        answer = tenant.http.post("/v1/completions", json={"model": model, **ASK})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.headers["x-chorale-adapter-digest"]

    assert ask(friend, "acme/beta") == ask(tiny.tenant, "beta") != ask(tiny.tenant, "base")

    def usage() -> list[dict]:
        return friend.http.get("/v1/usage?group_by=model").json()["data"]

    tiny.stack.wait(usage)
    assert [(row["model"], row["num_requests"]) for row in usage()] == [("acme/beta", 1)]


def test_a_pinned_adapter_comes_back_with_a_new_engine_before_anybody_asks(
    tiny: TinyWorld,
) -> None:
    def is_on_device() -> bool:
        found = tiny.tenant.http.get("/v1/adapters/gamma")
        return found.is_success and found.json()["latest"]["tier"] == "device"

    pin = tiny.tenant.http.put("/v1/adapters/gamma/pin").json()
    assert pin["version"] == 1
    assert pin["price_nanousd_per_hour"] > 0
    tiny.stack.wait(is_on_device)
    tiny.stack.kill("engine")
    tiny.stack.wait(lambda: not is_on_device())
    tiny.stack.wait_ready()
    tiny.stack.wait(is_on_device)
    assert tiny.tenant.http.delete("/v1/adapters/gamma/pin").is_success
