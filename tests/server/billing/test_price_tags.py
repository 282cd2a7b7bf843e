"""The remembered price of the base model, with a wall clock that the tests set."""

import asyncio
from collections.abc import Callable

import pytest

from server.billing.price_tags import PriceTags
from server.billing.prices import DEFAULT_PRICES, Price, Scope, add_price
from server.database.database import Database
from tests.server.factories import NOW_MS, Clock, make_price, make_tenant

Add = Callable[..., Price]


@pytest.fixture
def tenant_id(sqlite_database: Database) -> str:
    make_price(sqlite_database)
    return make_tenant(sqlite_database, plan="gold").tenant_id


def add(
    database: Database, scope: Scope, scope_id: str, at_ms: int, until_ms: int | None = None,
    base_model: str = "",
) -> Price:  # fmt: skip
    return database.write_sync(
        lambda c: add_price(
            c, DEFAULT_PRICES, effective_at_ms=at_ms, now_ms=NOW_MS, scope=scope,
            scope_id=scope_id, until_ms=until_ms, base_model=base_model,
        )
    )  # fmt: skip


def versions(
    tags: PriceTags, clock: Clock, tenant_id: str, times: list[int], base_model: str = "small"
) -> list[int]:
    """Price versions that apply at these times, asked one after the other."""

    async def ask() -> list[int]:
        found = []
        for clock.now in times:
            found.append((await tags.of(tenant_id, base_model)).price_version)
        return found

    return asyncio.run(ask())


def test_a_price_that_was_made_before_begins_and_ends_to_the_millisecond(
    sqlite_database: Database, tenant_id: str
) -> None:
    clock = Clock(NOW_MS)
    of_plan = add(sqlite_database, "plan", "gold", NOW_MS + 500, NOW_MS + 900).price_version
    tags = PriceTags(sqlite_database, now_ms=clock)
    times = [NOW_MS, NOW_MS + 499, NOW_MS + 500, NOW_MS + 899, NOW_MS + 900]
    assert versions(tags, clock, tenant_id, times) == [1, 1, of_plan, of_plan, 1]


def test_a_new_price_applies_here_once_it_is_made(
    sqlite_database: Database, tenant_id: str
) -> None:
    clock = Clock(NOW_MS)
    tags = PriceTags(sqlite_database, now_ms=clock)
    assert versions(tags, clock, tenant_id, [NOW_MS]) == [1]
    newer = add(sqlite_database, "tenant", tenant_id, NOW_MS).price_version
    assert versions(tags, clock, tenant_id, [NOW_MS]) == [1], "the old price is remembered"
    tags.forget()
    assert versions(tags, clock, tenant_id, [NOW_MS]) == [newer]


def test_a_tenant_has_a_price_for_each_base_model_that_has_one(
    sqlite_database: Database, tenant_id: str
) -> None:
    clock = Clock(NOW_MS)
    large = add(sqlite_database, "default", "", NOW_MS, NOW_MS + 5, "org/large").price_version
    tags = PriceTags(sqlite_database, now_ms=clock)
    times = [NOW_MS, NOW_MS + 5, NOW_MS]
    assert versions(tags, clock, tenant_id, times, "org/large") == [large, 1, large]
    assert versions(tags, clock, tenant_id, times, "small") == [1, 1, 1]
