"""Two tenants share nothing: no spelling of a name, no list, no object, no bill shows the other's.

tests/server/api/test_isolation.py asks every single route for ids of another tenant.
"""

from tests.e2e.oracle import TinyWorld
from tests.e2e.stack import Tenant

SPELLINGS = ("beta", "beta@1", "beta@latest", "acme/beta", "BETA", "beta ", "../beta")


def test_no_name_list_object_or_export_of_one_tenant_shows_anything_of_another(
    tiny: TinyWorld,
) -> None:
    other = tiny.stack.tenant("globex")
    other.push("own", tiny.dirs["alpha"])
    for name in SPELLINGS:
        answer = other.http.post("/v1/completions", json={"model": name, "prompt": "x"})
        assert answer.status_code == 404, name
    for path, ids in (("/v1/models", ["base", "own"]), ("/v1/adapters", ["own"])):
        assert [each["id"] for each in other.http.get(path).json()["data"]] == ids
    # Objects of equal digest are separate, so that deleting one keeps the other.
    digests = {digest_of(other, "own"), digest_of(tiny.tenant, "alpha")}
    assert len(digests) == 1
    objects = tiny.stack.data_dir / "objects" / "tenants"
    assert len(list(objects.glob(f"*/{digests.pop()}"))) == 2
    for tenant in (tiny.tenant, other):
        answer = tenant.http.post("/v1/completions", json={"model": "base", "prompt": "hello"})
        assert answer.status_code == 200
    tiny.stack.wait(lambda: other.http.get("/v1/usage").json()["data"][0]["num_requests"] >= 1)
    rows = other.http.get("/v1/usage/export?format=jsonl").text
    assert other.tenant_id in rows
    assert tiny.tenant.tenant_id not in rows


def digest_of(tenant: Tenant, name: str) -> str:
    digest: str = tenant.http.get(f"/v1/adapters/{name}").json()["latest"]["digest"]
    return digest
