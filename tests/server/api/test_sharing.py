"""Shared adapters, aliases with a canary, and pins, over HTTP."""

import pytest
import sqlalchemy as sa

from server.billing.tables import holds
from server.database import expiring_cache
from tests.registry.rows import add_version
from tests.server.in_process import InProcess

PUT, GET, DELETE = "PUT", "GET", "DELETE"


@pytest.fixture
def acme(product):
    """A tenant with an adapter, pirate, of one version."""
    return with_pirate(product)


@pytest.fixture
def globex(product):
    return product.user("globex")


def with_pirate(product):
    user = product.user("acme")
    publish(user, "pirate")
    return user


def publish(user, name, version=1, **fields):
    """Insert a version as the registry would."""
    gateway = user.product.gateway
    fields.setdefault("base_revision", gateway.bases.default.model.base_revision)
    gateway.database.write_sync(
        lambda conn: add_version(conn, user.tenant_id, name, version, **fields)
    )


def digest(user, name="pirate", number=1):
    listed = user.call(GET, f"/v1/adapters/{name}/versions").json()["data"]
    return next(version["digest"] for version in listed if version["version"] == number)


def offer(owner, tenant, name="pirate"):
    answer = owner.call(PUT, f"/v1/adapters/{name}/grants/{tenant}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def share(owner, grantee, name="pirate"):
    """Offer an adapter, and accept it."""
    offer(owner, grantee.name, name)
    answer = grantee.call(PUT, f"/v1/offers/{owner.name}/{name}")
    assert answer.status_code == 200, answer.text


def offers_to(user):
    return user.call(GET, "/v1/offers").json()["data"]


def served(answer):
    """Digest of the adapter that served the answer."""
    assert answer.status_code == 200, answer.text
    return answer.headers["x-chorale-adapter-digest"]


# ---- grants ----


@pytest.mark.parametrize("model", ["acme/pirate", "acme/pirate@latest", "acme/pirate@1"])
def test_a_shared_adapter_is_served_under_its_owners_name(acme, globex, model):
    share(acme, globex)
    answer = globex.complete(model)
    assert served(answer) == digest(acme)
    assert answer.json()["model"] == model


def test_who_uses_a_shared_adapter_pays_and_keeps_its_own_cache(product, acme, globex):
    share(acme, globex)
    own, shared = acme.complete("pirate"), globex.complete("acme/pirate")
    assert served(own) == served(shared)
    by_owner, by_other = product.engines.asked
    assert (by_owner.tenant_id, by_other.tenant_id) == (acme.tenant_id, globex.tenant_id)
    assert by_owner.adapter == by_other.adapter
    assert by_owner.cache_salt != by_other.cache_salt
    assert [tenant_id for tenant_id, _ in product.engines.prefetched] == [
        acme.tenant_id,
        globex.tenant_id,
    ]
    held = product.gateway.database.read_sync(
        lambda conn: conn.execute(sa.select(holds.c.tenant_id, holds.c.model)).all()
    )
    assert sorted(held) == sorted([(acme.tenant_id, "pirate"), (globex.tenant_id, "acme/pirate")])


def test_an_owner_may_use_its_full_name_too(acme):
    assert served(acme.complete("acme/pirate")) == digest(acme)


ABSENT = ["nobody/pirate", "acme/parrot", "acme/secret", "acme/secret@1", "acme/pirate@9"]
ABSENT += ["acme/pirate@beta", "acme/", "/pirate", "acme/pirate/pirate", "ACME/pirate", "globex/x"]


def test_what_is_not_shared_answers_exactly_as_what_is_not_there(acme, globex):
    """acme's adapter secret is not shared; pirate is, so that names may be wrong in one part."""
    publish(acme, "secret")
    share(acme, globex)

    def answers(model):
        for answer in (globex.complete(model), globex.call(GET, f"/v1/models/{model}")):
            headers = {name: answer.headers[name] for name in answer.headers}
            for name in ("content-length", "x-request-id", "date", "openai-processing-ms"):
                headers.pop(name, None)
            yield answer.status_code, answer.text.replace(model, "..."), headers

    absent = list(answers("parrot"))
    assert absent[0][0] == 404
    for model in ABSENT:
        assert list(answers(model)) == absent, model


def test_a_deleted_adapter_is_refused_and_comes_back_unshared(acme, globex):
    share(acme, globex)
    acme.call(DELETE, "/v1/adapters/pirate")
    assert globex.complete("acme/pirate").status_code == 404
    assert acme.call("POST", "/v1/adapters/pirate/restore").status_code == 200
    assert acme.complete("pirate").status_code == 200
    assert globex.complete("acme/pirate").status_code == 404


def test_a_base_model_whose_id_reads_like_a_shared_adapter_comes_first(migrated_sqlite, tmp_path):
    with InProcess.running(migrated_sqlite, tmp_path, "acme/pirate") as product:
        acme, globex = with_pirate(product), product.user("globex")
        share(acme, globex)
        assert served(globex.complete("acme/pirate")) == ""
        assert product.engines.asked[-1].adapter is None


def test_shared_adapters_are_listed_among_the_models(acme, globex):
    publish(acme, "old", base_revision="0" * 64)
    share(acme, globex)
    share(acme, globex, "old")
    models = globex.call(GET, "/v1/models").json()["data"]
    assert [(model["id"], model["owned_by"]) for model in models] == [
        ("base", "chorale"),
        ("acme/pirate", "acme"),
    ]
    assert globex.call(GET, "/v1/models/acme/pirate").json() == models[1]
    assert acme.call(GET, "/v1/models").json()["data"][-1]["id"] == "pirate"


def test_a_grantee_may_use_an_adapter_and_nothing_else(acme, globex):
    share(acme, globex)
    for name in ("pirate", "acme%2Fpirate"):
        assert globex.call(GET, f"/v1/adapters/{name}").status_code == 404
    assert globex.call(GET, "/v1/adapters").json()["data"] == []
    assert globex.call(GET, "/v1/adapters/pirate/grants").status_code == 404


def test_an_offered_adapter_is_as_good_as_absent_until_it_is_accepted(acme, globex):
    offer(acme, "globex")
    assert globex.complete("acme/pirate").status_code == 404
    assert [model["id"] for model in globex.call(GET, "/v1/models").json()["data"]] == ["base"]
    [shown] = offers_to(globex)
    told = {name: shown[name] for name in ("model", "status", "granted_at", "rank", "is_servable")}
    assert told == {
        "model": "acme/pirate", "status": "offered", "granted_at": None, "rank": 4,
        "is_servable": True,
    }  # fmt: skip
    assert (shown["prompt_nanousd"], shown["completion_nanousd"]) == (150, 600)
    assert shown["expires_at"] > shown["offered_at"]
    for _ in range(2):
        assert globex.call(PUT, "/v1/offers/acme/pirate").json()["accepted"]
    assert served(globex.complete("acme/pirate")) == digest(acme)
    [shown] = offers_to(globex)
    assert (shown["status"], shown["offered_at"]) == ("accepted", None)


def test_an_owner_is_told_of_acceptances_alone(product, acme, globex):
    product.user("initech")
    for name in ("globex", "initech", "nobody"):
        offer(acme, name)
    offer(acme, globex.tenant_id)
    globex.call(DELETE, "/v1/offers/acme/pirate")
    rows = acme.call(GET, "/v1/adapters/pirate/grants").json()["data"]
    assert {(row["status"], row["tenant_id"], row["granted_at"]) for row in rows} == {
        ("offered", None, None)
    }
    globex.call(PUT, "/v1/offers/acme/pirate")
    [accepted, *rows] = acme.call(GET, "/v1/adapters/pirate/grants").json()["data"]
    assert (accepted["status"], accepted["tenant_id"]) == ("accepted", globex.tenant_id)
    assert [row["tenant"] for row in rows] == ["initech", "nobody"]
    assert {offer(acme, text)["status"] for text in ("globex", globex.tenant_id)} == {"accepted"}


@pytest.mark.parametrize("by", ["name", "id"])
def test_an_owner_ends_a_grant_by_name_or_id_and_again_is_fine(acme, globex, by):
    share(acme, globex)
    text = globex.name if by == "name" else globex.tenant_id
    for _ in range(2):
        answer = acme.call(DELETE, f"/v1/adapters/pirate/grants/{text}")
        assert (answer.status_code, answer.json()["revoked"]) == (200, True)
        assert globex.complete("acme/pirate").status_code == 404
    assert acme.call(GET, "/v1/adapters/pirate/grants").json()["data"] == []


@pytest.fixture
def statements(product, monkeypatch):
    """SQL statements since the list was cleared. What is cached stays so, however slow it is."""
    monkeypatch.setattr(expiring_cache, "TTL_S", float("inf"))
    seen = []
    engine = product.gateway.database.engine
    sa.event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    return seen


def test_offering_to_a_name_is_the_same_whoever_has_it(product, acme, globex, statements):
    """The tenants differ in all that could show: there is none, it has an offer, it declined."""
    product.user("initech")
    publish(acme, "second")
    publish(acme, "third")
    for name in ("second", "third"):
        offer(acme, "initech", name)
    calls = []
    for tenant in ("nobody", "globex", "initech", globex.tenant_id):
        for method in (PUT, PUT, DELETE, DELETE):
            statements.clear()
            answer = acme.call(method, f"/v1/adapters/pirate/grants/{tenant}")
            body = {name: value for name, value in answer.json().items() if name != "expires_at"}
            told = answer.status_code, str(body).replace(tenant, "...")
            calls.append((method, told, [*statements]))
    assert calls[:4] * 4 == calls


def test_an_offer_that_was_not_made_is_the_same_whoever_is_named(acme, globex, statements):
    globex.call(GET, "/v1/offers")
    for method in (PUT, DELETE):
        seen = []
        for model in ("nobody/pirate", "acme/pirate", "acme/parrot", "globex/pirate"):
            statements.clear()
            answer = globex.call(method, f"/v1/offers/{model}")
            seen.append((answer.status_code, answer.json(), [*statements]))
        assert seen == seen[:1] * 4
        assert (seen[0][0], seen[0][1]["error"]["code"]) == (404, "offer_not_found")


def test_a_model_of_another_tenant_is_looked_for_the_same_whether_there_is_one(
    acme, globex, statements
):
    globex.call(GET, "/v1/models")
    seen = []
    for model in ("nobody/pirate", "acme/pirate", "acme/parrot"):
        statements.clear()
        assert globex.call(GET, f"/v1/models/{model}").status_code == 404
        seen.append([*statements])
    assert seen == seen[:1] * 3


def test_a_tenant_whose_name_reads_like_anothers_id_gets_none_of_its_offers(product, acme, globex):
    twin = product.user(globex.tenant_id)
    offer(acme, globex.tenant_id)
    assert (len(offers_to(globex)), offers_to(twin)) == (1, [])


def test_an_offer_that_cannot_be_is_refused(acme, globex):
    for text in ("acme", acme.tenant_id, "No%20Name"):
        refused = acme.call(PUT, f"/v1/adapters/pirate/grants/{text}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenant")
    assert globex.call(PUT, "/v1/offers/A%20B/pirate").status_code == 404


# ---- an alias with a canary ----


def weigh(acme):
    """Make latest version 2 with version 1 as a 50 % canary; return the digests of both."""
    publish(acme, "pirate", 2)
    body = {"version": 2, "canary": {"version": 1, "percent": 50}}
    assert acme.call(PUT, "/v1/adapters/pirate/aliases/latest", body).status_code == 200
    return {digest(acme, number=number) for number in (1, 2)}


@pytest.mark.parametrize("field", ["user", "safety_identifier", "prompt_cache_key"])
def test_requests_of_one_key_stay_with_one_version_and_are_told_which(acme, field):
    both = weigh(acme)
    by_key = {
        key: {served(acme.complete("pirate", **{field: key})) for _ in range(2)}
        for key in (f"k{number}" for number in range(12))
    }
    assert all(len(digests) == 1 for digests in by_key.values())
    assert set.union(*by_key.values()) == both


def test_the_most_particular_key_decides(acme):
    weigh(acme)
    by_user = [served(acme.complete("pirate", user=f"k{n}")) for n in range(12)]
    for keys in ({"safety_identifier": "all"}, {"prompt_cache_key": "all"}):
        others = {served(acme.complete("pirate", user=f"k{n}", **keys)) for n in range(12)}
        assert len(others) == 1
    assert len(set(by_user)) == 2


# ---- pins ----


def test_a_pin_is_shown_with_its_price(acme):
    publish(acme, "pirate", 2, device_bytes=5_000_000)
    pinned = acme.call(PUT, "/v1/adapters/pirate/pin").json()
    shown = acme.call(GET, "/v1/adapters/pirate").json()["pin"]
    assert shown == {name: pinned[name] for name in shown}
    assert (shown["version"], shown["size_bytes"]) == (2, 5_000_000)
    assert shown["price_nanousd_per_hour"] == 200_000  # 4 cents per GB and hour
    assert acme.call(GET, "/v1/adapters").json()["data"][0]["pin"] == shown
    for _ in range(2):
        assert acme.call(DELETE, "/v1/adapters/pirate/pin").status_code == 200
    assert acme.call(GET, "/v1/adapters/pirate").json()["pin"] is None
