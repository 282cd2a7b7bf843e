"""Two tenants share nothing: no spelling of a name, no list, no object, no bill shows the other's.

tests/server/api/test_isolation.py asks every single route for ids of another tenant.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TinyWorld
from tests.e2e.stack import Tenant


@pytest.fixture(scope="module")
def other(tiny: TinyWorld) -> Iterator[Tenant]:
    tenant = tiny.stack.tenant("globex")
    tenant.push("own", tiny.dirs["alpha"])
    return tenant


@pytest.mark.parametrize("name", ["beta@1", "beta@latest", "acme/beta", "BETA", "beta ", "../beta"])
def test_no_spelling_reaches_anothers_adapter(tiny: TinyWorld, other: Tenant, name: str) -> None:
    answer = other.http.post("/v1/completions", json={"model": name, "prompt": "x"})
    assert answer.status_code == 404


def test_lists_hold_only_the_tenants_own(tiny: TinyWorld, other: Tenant) -> None:
    models = [model["id"] for model in other.http.get("/v1/models").json()["data"]]
    assert models == ["base", "own"]
    adapters = [adapter["id"] for adapter in other.http.get("/v1/adapters").json()["data"]]
    assert adapters == ["own"]


def test_the_same_files_of_two_tenants_are_two_objects(tiny: TinyWorld, other: Tenant) -> None:
    """Objects of equal digest are separate in the store, so that deleting one keeps the other."""
    objects = tiny.stack.data_dir / "objects" / "tenants"
    digest = other.http.get("/v1/adapters/own").json()["latest"]["digest"]
    assert digest == tiny.tenant.http.get("/v1/adapters/alpha").json()["latest"]["digest"]
    assert len(list(Path(objects).glob(f"*/{digest}"))) == 2


def test_a_lost_object_of_one_tenant_is_nothing_to_the_equal_one_of_another(
    tiny: TinyWorld,
) -> None:
    careless, careful = tiny.stack.tenant("careless"), tiny.stack.tenant("careful")
    for tenant in (careless, careful):
        tenant.push("same", tiny.dirs["gamma"])
    digest = careless.http.get("/v1/adapters/same").json()["latest"]["digest"]
    for path in (tiny.stack.data_dir / "cache" / "adapters").glob(f"{digest}.*"):
        path.unlink()
    (tiny.stack.data_dir / "objects" / "tenants" / careless.tenant_id / digest).unlink()
    # The engine has just proved the adapter and so has it in memory; a new engine needs the object.
    tiny.stack.kill("engine")
    body = {"model": "same", "prompt": [5, 6, 7], "max_tokens": 2}
    tiny.stack.wait(lambda: careless.http.post("/v1/completions", json=body).status_code == 502)
    assert careful.http.post("/v1/completions", json=body).status_code == 200
    assert careful.http.get("/v1/adapters/same").json()["latest"]["tier"] == "device"
    assert careless.http.get("/v1/adapters/same").json()["latest"]["tier"] == "failed"


def test_usage_and_exports_are_the_tenants_own(tiny: TinyWorld, other: Tenant) -> None:
    for tenant in (tiny.tenant, other):
        answer = tenant.http.post("/v1/completions", json={"model": "base", "prompt": "hello"})
        assert answer.status_code == 200
    tiny.stack.wait(lambda: other.http.get("/v1/usage").json()["data"][0]["num_requests"] >= 1)
    rows = other.http.get("/v1/usage/export?format=jsonl").text
    assert other.tenant_id in rows
    assert tiny.tenant.tenant_id not in rows


def test_a_revoked_key_and_a_suspended_tenant_are_refused_at_once(tiny: TinyWorld) -> None:
    tenant = tiny.stack.tenant("initech")
    assert tenant.http.get("/v1/models").status_code == 200
    keys = tiny.stack.operator.get("/admin/v1/tenants/initech/keys").json()["data"]
    key_id = keys[0]["key_id"]
    assert tiny.stack.operator.delete(f"/admin/v1/tenants/initech/keys/{key_id}").is_success
    assert tenant.http.get("/v1/models").status_code == 401
    fresh = tiny.stack.operator.post("/admin/v1/tenants/initech/keys", json={}).json()["api_key"]
    tiny.stack.operator.post("/admin/v1/tenants/initech/suspend")
    assert tiny.stack.client(fresh).get("/v1/models").status_code == 403
    tiny.stack.operator.post("/admin/v1/tenants/initech/resume")
    assert tiny.stack.client(fresh).get("/v1/models").status_code == 200
