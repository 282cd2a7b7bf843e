from dataclasses import replace

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from registry.base.base_models import BaseModels
from registry.catalog.alias_rows import Target
from registry.catalog.catalog import Catalog
from tests.refusals import refused
from tests.registry.publishing import publish

A, B = "tenant-a", "tenant-b"


@pytest.mark.parametrize(
    "model",
    ["", "x", "pirate@3", "pirate@0", "pirate@01", "pirate@beta", "pirate@", "@1", "pirate@1@1"]
    + ["Pirate", "tenant-a/pirate", "pirate\0", "pirate\n", "pirate@99999999999999999999", "é"],
)
def test_what_is_not_there_is_not_found(catalog, connection, make_version, model):
    make_version()
    with refused("model_not_found"):
        catalog.resolve(connection, A, model)


def test_another_tenants_adapter_and_none_are_the_same_answer(catalog, connection, make_version):
    def answer(tenant_id, model):
        with refused("model_not_found") as caught:
            catalog.resolve(connection, tenant_id, model)
        return str(caught.value).replace(model, "..."), caught.value.code, type(caught.value)

    make_version()
    assert answer(B, "pirate") == answer(B, "parrot") == answer(A, "parrot")
    assert answer(B, "pirate@1") == answer(B, "parrot@1")


def test_tenants_do_not_see_each_others_adapters(catalog, connection, make_version):
    make_version(alias="prod")
    assert catalog.list_adapters(connection, B) == []
    for ask in (
        lambda: catalog.get_adapter(connection, B, "pirate"),
        lambda: catalog.list_versions(connection, B, "pirate"),
        lambda: catalog.list_moves(connection, B, "pirate", "latest"),
        lambda: catalog.set_alias(connection, B, "pirate", "prod", 1),
        lambda: catalog.roll_back_alias(connection, B, "pirate", "latest"),
        lambda: catalog.remove_alias(connection, B, "pirate", "prod"),
        lambda: catalog.delete_version(connection, B, "pirate", 1),
        lambda: catalog.restore_version(connection, B, "pirate", 1),
        lambda: catalog.delete_adapter(connection, B, "pirate"),
        lambda: catalog.restore_adapter(connection, B, "pirate"),
    ):
        with refused("model_not_found"):
            ask()


def test_the_same_name_of_two_tenants_is_two_adapters(connection, make_version):
    mine, theirs = make_version(), make_version(tenant_id=B)
    assert mine.adapter_id != theirs.adapter_id
    assert mine.digest == theirs.digest
    assert mine.object_key != theirs.object_key


@pytest.fixture
def newer(base, clock):
    """The catalog of a gateway that serves another base model."""
    return Catalog(BaseModels(replace(base, base_revision="f" * 64)), clock)


def test_a_version_for_another_base_model_is_not_served(connection, make_version, newer):
    make_version()
    with refused("model_not_servable"):
        newer.resolve(connection, A, "pirate")
    assert newer.list_adapters(connection, A)[0].latest is not None
    with refused("model_not_found"):
        newer.resolve(connection, B, "pirate")


def test_adapters_are_listed_by_name_with_latest_and_aliases(catalog, connection, make_version):
    version = make_version(name="b", alias="prod")
    make_version(name="a")
    adapters = catalog.list_adapters(connection, A)
    assert [adapter.name for adapter in adapters] == ["a", "b"]
    assert adapters[1].latest == version
    assert adapters[1].aliases == {"latest": Target(1), "prod": Target(1)}
    assert [a.name for a in catalog.list_adapters(connection, A, after="a")] == ["b"]
    assert [a.name for a in catalog.list_adapters(connection, A, limit=1)] == ["a"]


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("", ["a_b", "a.b", "pirate", "pirate-2"]),
        ("ira", ["pirate", "pirate-2"]),
        ("_", ["a_b"]),
        ("a.b", ["a.b"]),
        ("%", []),
        ("PIR", []),
        ("\0", []),
        ("a" * 65, []),
    ],
)
def test_a_search_finds_what_has_it_in_its_name(catalog, connection, make_version, search, found):
    for name in ("pirate", "pirate-2", "a_b", "a.b"):
        make_version(name=name)
    make_version(B, "pirate-3")
    listed = catalog.list_adapters(connection, A, search=search)
    assert sorted(adapter.name for adapter in listed) == sorted(found)


def test_pages_of_a_search_put_together_are_the_whole(catalog, connection, make_version):
    names = [f"{kind}-{number}" for kind in ("pirate", "poet") for number in range(5)]
    for name in names:
        make_version(name=name)
    found, after = [], None
    while page := catalog.list_adapters(connection, A, search="pir", after=after, limit=2):
        found += [adapter.name for adapter in page]
        after = found[-1]
    assert found == names[:5]


@pytest.mark.parametrize("after", ["Pirate", "a/b", "\0", "a" * 65])
def test_a_page_cannot_begin_after_what_is_no_name(catalog, connection, after):
    with refused("invalid_name"):
        catalog.list_adapters(connection, A, after=after)


def test_a_page_is_three_queries_however_long(catalog, database, make_version):
    def count(limit):
        statements = []
        event.listen(database, "before_cursor_execute", lambda *given: statements.append(given[2]))
        with database.connect() as conn:
            assert len(catalog.list_adapters(conn, A, limit=limit)) == limit
        return len(statements)

    for number in range(7):
        make_version(name=f"adapter-{number}", alias="prod")
    assert count(7) == 3


def test_who_changes_a_tenants_names_waits_for_who_began_before(catalog, make_version, database):
    """The lock keeps a version from being deleted while a connection points an alias at it."""
    if database.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer")
    make_version()
    changes = [
        lambda conn: publish(catalog, conn, A, content="2"),
        lambda conn: catalog.set_alias(conn, A, "pirate", "prod", 1),
        lambda conn: catalog.roll_back_alias(conn, A, "pirate", "latest"),
        lambda conn: catalog.remove_alias(conn, A, "pirate", "prod"),
        lambda conn: catalog.delete_version(conn, A, "pirate", 1),
        lambda conn: catalog.restore_version(conn, A, "pirate", 1),
        lambda conn: catalog.delete_adapter(conn, A, "pirate"),
        lambda conn: catalog.restore_adapter(conn, A, "pirate"),
    ]
    with database.begin() as first:
        catalog.set_alias(first, A, "pirate", "prod", 1)
        for change in changes:
            with database.connect() as second:
                second.execute(text("SET LOCAL lock_timeout = '5ms'"))
                with pytest.raises(OperationalError, match="lock timeout"):
                    change(second)
        with database.begin() as neighbours:
            publish(catalog, neighbours, B)
