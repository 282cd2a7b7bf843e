"""The pages of adapters: the list, one adapter, and what other tenants share."""

from typing import Any

import pytest

from engine.wire.messages import Residency
from server.accounts.auth import SCOPES
from tests.registry.publishing import publish
from tests.registry.rows import add_version
from tests.server.console.browsing import SignIn, Visitor, path_of
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import InProcess, User

PAGES = ["/console/adapters", "/console/adapters/pirate", "/console/offers"]


def make_versions(user: User, name: str = "pirate", number: int = 1, **options: Any) -> list[str]:
    """Publish versions; return their object keys."""
    gateway = user.product.gateway

    def write(conn: Any) -> list[str]:
        return [
            publish(
                gateway.catalog, conn, user.tenant_id, name, content=f"{name}{index}", **options
            ).object_key
            for index in range(number)
        ]

    return gateway.database.write_sync(write)


@pytest.fixture
def globex(product: InProcess) -> User:
    return product.user(scopes=SCOPES)


def share(acme: User, globex: User, name: str) -> None:
    assert acme.call("PUT", f"/v1/adapters/{name}/grants/{globex.name}").is_success
    assert globex.call("PUT", f"/v1/offers/{acme.name}/{name}").is_success


@pytest.mark.parametrize("path", PAGES)
def test_forms_appear_only_for_a_key_that_may_write(
    acme: User, globex: User, signed_in: SignIn, path: str
) -> None:
    make_versions(acme, number=2)
    make_versions(acme, "gone")
    acme.call("DELETE", "/v1/adapters/gone")
    add = lambda conn: add_version(conn, globex.tenant_id, "theirs")  # noqa: E731
    globex.product.gateway.database.write_sync(add)
    share(globex, acme, "theirs")
    assert "data-method" in signed_in(acme).get(path).text
    page = signed_in(acme.with_new_key(scopes=["adapters:read"])).get(path).text
    assert "data-method" not in page
    assert 'id="upload"' not in page


def test_the_list_says_where_each_is_and_with_how_many_it_is_shared(
    product: InProcess, acme: User, globex: User, signed_in: SignIn
) -> None:
    key = make_versions(acme)[0]
    make_versions(acme, "cold")
    share(acme, globex, "pirate")
    stays = {
        name: [Residency(object_key=key, digest="", tier=tier, size_bytes=1)]  # type: ignore[arg-type]
        for name, tier in (("one", "device"), ("two", "remote"))
    }
    product.use(FakeEngines(names=tuple(stays), residency=stays))
    page = signed_in(acme).get("/console/adapters").text
    cold, pirate = page.split("<tbody>")[1].split("</tr>")[:2]
    assert "object store" in cold
    assert 'good">device</span> <span class="quiet">on one<' in pirate
    assert "two" not in pirate
    assert '<td class="number">1</td></tr>' in f"{pirate}</tr>"


def test_an_adapter_whose_base_model_is_not_served_is_in_the_list(
    product: InProcess, acme: User, signed_in: SignIn
) -> None:
    product.gateway.database.write_sync(lambda c: add_version(c, acme.tenant_id, "of-another"))
    page = signed_in(acme).get("/console/adapters").text
    assert ">of-another<" in page
    assert "not served now" in page


def test_the_list_has_pages_and_a_filter_in_the_url(acme: User, visitor: Visitor) -> None:
    for index in range(51):
        make_versions(acme, f"a{index:02}")
    make_versions(acme, "b")
    page = visitor.get("/console/adapters?search=a").text
    assert ">a49<" in page
    assert ">a50<" not in page
    following = path_of(page.split('class="button" href="')[1].split('"')[0].replace("&amp;", "&"))
    page = visitor.get(following).text
    assert ">a50<" in page
    assert ">a49<" not in page
    assert ">b<" not in page
    assert "No adapter&#39;s name has" in visitor.get("/console/adapters?search=%25").text


def test_an_adapter_shows_its_versions_aliases_split_and_their_past(
    acme: User, signed_in: SignIn
) -> None:
    make_versions(acme, number=3)
    body = {"version": 1, "canary": {"version": 2, "percent": 10}}
    acme.call("PUT", "/v1/adapters/pirate/aliases/stable", body)
    page = signed_in(acme).get("/console/adapters/pirate?alias=stable").text
    assert "version 1 for 90 % of requests, version 2 for 10 %" in page
    assert "Passport of version 3, the latest" in page
    assert "Past of stable" in page
    assert "version 1, 10 % to version 2" in page
    assert 'aria-label="Delete version 1"' not in page  # an alias means it
    assert 'aria-label="Make latest: version 1"' in page


def test_a_former_versions_passport_is_shown_on_demand(acme: User, visitor: Visitor) -> None:
    make_versions(acme, number=2)
    assert "Passport of version 1<" in visitor.get("/console/adapters/pirate?version=1").text
    for version in (3, 999_999_999):
        assert visitor.get(f"/console/adapters/pirate?version={version}").status_code == 404


def test_versions_and_moves_have_pages(acme: User, visitor: Visitor) -> None:
    make_versions(acme, number=21)
    page = visitor.get("/console/adapters/pirate").text
    assert "before=2" in page
    assert "moved_before=" in page
    older = visitor.get("/console/adapters/pirate?before=2").text
    assert ">1</a>" in older
    assert ">2</a>" not in older


@pytest.mark.parametrize(
    "query", ["version=0", "version=1000000000", "version=x", "alias=9", "nothing=1", "before=-1"]
)
def test_a_malformed_query_is_refused_by_its_name(
    acme: User, signed_in: SignIn, query: str
) -> None:
    make_versions(acme)
    answer = signed_in(acme).get(f"/console/adapters/pirate?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.text


@pytest.mark.parametrize("is_deleted", [False, True])
def test_another_tenants_adapter_is_not_found(
    acme: User, globex: User, signed_in: SignIn, is_deleted: bool
) -> None:
    make_versions(acme)
    if is_deleted:
        acme.call("DELETE", "/v1/adapters/pirate")
    visitor = signed_in(globex)
    assert visitor.get("/console/adapters/pirate").status_code == 404
    assert "pirate" not in visitor.get("/console/adapters").text


def test_a_deleted_adapter_can_be_restored_from_its_page_and_from_the_list(
    acme: User, visitor: Visitor
) -> None:
    make_versions(acme)
    acme.call("DELETE", "/v1/adapters/pirate")
    for path in ("/console/adapters/pirate", "/console/adapters"):
        page = visitor.get(path)
        assert page.status_code == 200
        assert 'data-path="/v1/adapters/pirate/restore"' in page.text
    acme.call("POST", "/v1/adapters/pirate/restore")
    assert "/restore" not in visitor.get("/console/adapters").text


def test_offers_and_accepted_adapters_can_be_answered(
    acme: User, globex: User, signed_in: SignIn
) -> None:
    for name in ("offered", "accepted"):
        make_versions(globex, name)
    assert globex.call("PUT", f"/v1/adapters/offered/grants/{acme.name}").is_success
    share(globex, acme, "accepted")
    page = signed_in(acme).get("/console/offers").text
    for name, verbs in {"offered": ("Accept", "Decline"), "accepted": ("Give back",)}.items():
        for verb in verbs:
            assert f'aria-label="{verb} {globex.name}/{name}"' in page
    assert f'aria-label="Accept {globex.name}/accepted"' not in page
    given = signed_in(globex).get("/console/adapters/accepted").text
    assert f'data-path="/v1/adapters/accepted/grants/{acme.name}"' in given


def test_a_pin_shows_its_price_and_can_be_ended(acme: User, signed_in: SignIn) -> None:
    make_versions(acme)
    assert acme.call("PUT", "/v1/adapters/pirate/pin").is_success
    page = signed_in(acme).get("/console/adapters/pirate").text
    assert "Version 1 is pinned since" in page
    assert 'data-method="DELETE" data-path="/v1/adapters/pirate/pin"' in page
