"""A tenant's adapters over HTTP: lists, search, versions, aliases and their moves, deletion."""

from datetime import UTC, datetime

import pytest
from openai.types import Model

from registry.catalog import deleted_rows
from server.accounts.tenants import TenantLimits, set_limits
from tests.registry.publishing import publish
from tests.server.factories import NOW_MS

GET, PUT, POST, DELETE = "GET", "PUT", "POST", "DELETE"


@pytest.fixture
def acme(shared_product):
    """A new tenant for each test, with versions 1 to 3 of pirate; prod means 1, latest 3."""
    user = shared_product.user()
    for content in "123":
        make_version(user, content=content, alias="prod" if content == "1" else None)
    return user


def make_version(user, name="pirate", **options):
    gateway = user.product.gateway
    gateway.database.write_sync(
        lambda conn: publish(gateway.catalog, conn, user.tenant_id, name, **options)
    )


def call(user, method, path, body=None):
    """Make a call that must succeed; return its JSON."""
    answer = user.call(method, f"/v1/adapters{path}", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(user, method, path, body=None):
    """(status, code) of a call that must be refused."""
    answer = user.call(method, f"/v1/adapters{path}", body)
    return answer.status_code, answer.json()["error"]["code"]


def test_an_adapter_shows_its_aliases_and_the_canaries_of_those_that_have_one(acme):
    canary = {"version": 2, "percent": 10}
    answer = call(acme, PUT, "/pirate/aliases/prod", {"version": 1, "canary": canary})
    assert answer["aliases"] == {"latest": 3, "prod": 1}
    assert answer["canaries"] == {"prod": canary}
    assert answer["latest"]["version"] == 3
    assert call(acme, GET, "/pirate") == answer
    assert call(acme, GET, "")["data"] == [answer]


def test_a_model_was_created_when_its_adapter_was(acme):
    model = acme.call(GET, "/v1/models/pirate").json()
    assert model["created"] == call(acme, GET, "/pirate")["created_at"]


def test_a_version_has_a_shutdown_date_from_its_deletion_to_its_restoration_or_end(acme):
    def model(name):
        return acme.call(GET, f"/v1/models/{name}").json()

    before = model("pirate@2")
    assert (before["root"], before["parent"], before["shutdown_date"]) == ("pirate", "base", None)
    call(acme, DELETE, "/pirate/versions/2")
    at_s = call(acme, GET, "/pirate/versions?include_deleted=true")["data"][1]["deleted_at"]
    day = f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d}"
    assert model("pirate@2") == before | {"shutdown_date": day}
    assert Model.model_validate(model("pirate@2"), strict=True).to_dict() == model("pirate@2")
    assert model("pirate@1")["shutdown_date"] is None
    assert "pirate@2" not in acme.call(GET, "/v1/models").text
    assert acme.complete("pirate@2").status_code == 404
    call(acme, POST, "/pirate/versions/2/restore")
    assert model("pirate@2") == before
    call(acme, DELETE, "/pirate/versions/2")
    acme.product.gateway.database.write_sync(
        lambda conn: deleted_rows.purge_versions(conn, (at_s + 3600) * 1000, limit=100)
    )
    assert acme.call(GET, "/v1/models/pirate@2").status_code == 404


@pytest.mark.parametrize("model", ["pirate@9", "pirate@prod", "pirate", "nobody/pirate@2"])
def test_what_was_not_deleted_as_a_version_is_not_found(acme, model):
    call(acme, DELETE, "/pirate")
    assert acme.call(GET, f"/v1/models/{model}").status_code == 404


@pytest.mark.parametrize(
    "body",
    [{}, {"version": "x"}, {"version": 1, "percent": 5}, {"version": 1, "canary": {"version": 2}}],
)
def test_an_alias_that_is_half_said_is_not_set(acme, body):
    assert refused(acme, PUT, "/pirate/aliases/prod", body)[0] == 400
    assert call(acme, GET, "/pirate")["aliases"]["prod"] == 1


def test_a_rollback_goes_back_and_again_forth(acme):
    for meant in (2, 3):
        answer = call(acme, POST, "/pirate/aliases/latest/rollback")
        assert (answer["aliases"]["latest"], answer["latest"]["version"]) == (meant, meant)
    nothing = refused(acme, POST, "/pirate/aliases/prod/rollback")
    assert nothing == (409, "nothing_to_roll_back")


def test_moves_name_who_moved_and_come_in_pages(acme):
    call(acme, PUT, "/pirate/aliases/prod", {"version": 2, "canary": {"version": 3, "percent": 5}})
    call(acme, DELETE, "/pirate/aliases/prod")
    page = call(acme, GET, "/pirate/aliases/prod/moves?limit=2")
    moves = [(move["version"], move["canary"]) for move in page["data"]]
    assert moves == [(None, None), (2, {"version": 3, "percent": 5})]
    assert page["has_more"]
    assert all(move["moved_by"].startswith("key:") for move in page["data"])
    rest = call(acme, GET, f"/pirate/aliases/prod/moves?before={page['data'][-1]['id']}")
    assert [move["version"] for move in rest["data"]] == [1]
    assert not rest["has_more"]


def test_a_removed_alias_is_gone_and_latest_stays(acme):
    assert call(acme, DELETE, "/pirate/aliases/prod")["aliases"] == {"latest": 3}
    assert refused(acme, DELETE, "/pirate/aliases/prod") == (404, "model_not_found")
    assert refused(acme, DELETE, "/pirate/aliases/latest") == (400, "invalid_name")


def test_a_version_in_use_is_not_deleted_and_the_answer_names_its_aliases(acme):
    answer = acme.call(DELETE, "/v1/adapters/pirate/versions/3")
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "version_in_use"
    assert "latest" in answer.json()["error"]["message"]


def test_a_deleted_version_is_listed_on_request_and_restored(acme):
    answer = call(acme, DELETE, "/pirate/versions/2")
    assert answer == {
        "id": "pirate", "version": 2, "object": "adapter.version.deleted", "deleted": True
    }  # fmt: skip

    def listed(query):
        return {v["version"]: v for v in call(acme, GET, f"/pirate/versions{query}")["data"]}

    assert list(listed("")) == [3, 1]
    deleted = listed("?include_deleted=true")[2]
    assert deleted["state"] == "deleted"
    assert deleted["deleted_at"] > 0
    restored = call(acme, POST, "/pirate/versions/2/restore")
    assert (restored["state"], restored["deleted_at"]) == ("ready", None)
    assert listed("")[2] == restored
    assert refused(acme, POST, "/pirate/versions/2/restore") == (409, "not_deleted")


def test_a_deleted_adapter_comes_back_as_it_was(acme):
    before = call(acme, GET, "/pirate")
    call(acme, DELETE, "/pirate")
    assert refused(acme, GET, "/pirate") == (404, "model_not_found")
    told = acme.call("DELETE", "/v1/adapters/pirate").json()["error"]["message"]
    assert told.startswith("The adapter 'pirate' does not exist")
    assert call(acme, POST, "/pirate/restore") == before
    assert refused(acme, POST, "/pirate/restore") == (409, "not_deleted")


def test_a_search_comes_in_pages_by_name(acme):
    for name in ("parrot", "private", "poet"):
        make_version(acme, name)
    page = call(acme, GET, "?search=p&limit=2")
    assert [adapter["id"] for adapter in page["data"]] == ["parrot", "pirate"]
    assert page["has_more"]
    page = call(acme, GET, "?search=p&after=pirate")
    assert [adapter["id"] for adapter in page["data"]] == ["poet", "private"]
    assert not page["has_more"]
    assert [a["id"] for a in call(acme, GET, "?search=riv")["data"]] == ["private"]


@pytest.mark.parametrize(
    "query", [f"?search={'a' * 65}", "?after=A", "?after=%00", "?limit=0", "?limit=1001"]
)
def test_a_page_that_cannot_be_is_refused(acme, query):
    assert refused(acme, GET, query)[0] == 400


@pytest.mark.parametrize("before", ["0", "-1", "x", str(2**63)])
@pytest.mark.parametrize("path", ["/pirate/versions", "/pirate/aliases/prod/moves"])
def test_a_page_before_no_number_is_refused(acme, path, before):
    assert refused(acme, GET, f"{path}?before={before}")[0] == 400


@pytest.mark.parametrize("number", ["0", "4", "-1", str(10**12), str(10**30)])
def test_a_version_that_is_not_there_is_not_found(acme, number):
    for method, path in ((DELETE, ""), (POST, "/restore")):
        found = refused(acme, method, f"/pirate/versions/{number}{path}")
        assert found == (404, "model_not_found")
    body = {"version": int(number)}
    assert refused(acme, PUT, "/pirate/aliases/prod", body) == (404, "model_not_found")


def test_a_restore_that_is_over_a_limit_is_refused_and_changes_nothing(acme):
    call(acme, DELETE, "/pirate")
    make_version(acme, "parrot", content="9")
    limit(acme, max_adapters=1)
    assert refused(acme, POST, "/pirate/restore") == (429, "quota_exceeded")
    assert [adapter["id"] for adapter in call(acme, GET, "")["data"]] == ["parrot"]
    call(acme, DELETE, "/parrot")
    assert call(acme, POST, "/pirate/restore")["aliases"] == {"latest": 3, "prod": 1}
    call(acme, DELETE, "/pirate/versions/2")
    limit(acme, max_adapter_bytes_total=1)
    assert refused(acme, POST, "/pirate/versions/2/restore") == (429, "quota_exceeded")


def limit(user, **limits):
    user.product.gateway.database.write_sync(
        lambda conn: set_limits(conn, user.tenant_id, TenantLimits(**limits), now_ms=NOW_MS)
    )
    user.product.gateway.identities.forget(user.tenant_id)
