"""The operator's routes of the engine pool."""

import dataclasses
from types import SimpleNamespace

import sqlalchemy as sa

from engine.wire.messages import DraftStats, EngineStats, GrammarStats, TierStats, Welcome
from server.api.endpoints.engines import (
    DraftFigures,
    EngineStatsAnswer,
    GrammarFigures,
    TierFigures,
)
from server.billing import holds
from server.billing.settler import LEASE, SILENT_MS
from server.database.clock import now_ms
from server.database.leases import MACHINE
from server.database.tables import leases
from server.pool.engines import EngineFigures
from server.pool.suspects import LIFETIME_S
from tests.server.api.test_metrics import make_stats
from tests.server.factories import NOW_MS, insert_holds, make_hold, make_price
from tests.server.fake_engines import FakeEngines, make_suspects
from tests.server.in_process import InProcess

PATH = "/admin/v1/engines/{}/lost"


def test_what_an_engine_held_that_never_comes_back_is_voided(product: InProcess) -> None:
    database = product.gateway.database
    price = make_price(database)
    old = {"engine_id": "gone", "created_at_ms": NOW_MS, "expires_at_ms": NOW_MS + 1}
    count = holds.MAX_VOIDED_AT_ONCE + 3  # more than one transaction takes
    insert_holds(
        database,
        *(make_hold(price, f"r{number}", **old) for number in range(count)),
        make_hold(price, "young", engine_id="gone", expires_at_ms=now_ms() + 600_000),
    )
    answer = product.operator.call("POST", PATH.format("gone"))
    assert (answer.status_code, answer.json()) == (
        200,
        {"object": "engine.lost", "engine_id": "gone", "num_voided": count, "num_open": 1},
    )
    again = product.operator.call("POST", PATH.format("gone")).json()
    assert (again["num_voided"], again["num_open"]) == (0, 1)


def test_an_engine_that_nobody_knows_is_not_lost(product: InProcess) -> None:
    database = product.gateway.database
    text = product.operator.call("POST", PATH.format("typo")).json()["error"]["message"]
    assert text.endswith("; there are: none."), "the engine of the pool cannot be named either"
    insert_holds(database, make_hold(make_price(database), "r", engine_id="gone"))
    answer = product.operator.call("POST", PATH.format("typo"))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        404, "engine_not_found", "engine_id",
    )  # fmt: skip
    assert error["message"].startswith("There is no engine 'typo' that has open holds; there are: ")
    assert "gone" in error["message"]
    assert not product.operator.call("GET", "/admin/v1/audit-log?action=engine.lost").json()["data"]


def test_engines_of_other_machines_are_listed_until_they_are_lost(product: InProcess) -> None:
    database = product.gateway.database
    fields = dict.fromkeys(Welcome.__slots__, 1) | {"engine_id": "engine-1", "device": "cpu"}
    figures = [EngineFigures("engine", "starting", SimpleNamespace(**fields), None, 0)]
    product.use(FakeEngines(seen=figures))
    ages_ms = {"engine-1": 0, "near": -SILENT_MS, "gone": SILENT_MS + 1}
    rows = [
        {"name": LEASE + name, "holder": f"{name}-host/1", "expires_at_ms": now_ms() + 10_000 - ms}
        for name, ms in ages_ms.items()
    ]
    database.write_sync(lambda conn: conn.execute(sa.insert(leases), rows))

    def listed() -> list[tuple[object, ...]]:
        found = product.operator.call("GET", "/admin/v1/engines").json()["data"]
        is_old = [engine["seen_s"] >= SILENT_MS // 1000 for engine in found]
        assert is_old == [engine["state"] == "silent" for engine in found]
        return [(engine["engine_id"], engine["machine"], engine["state"]) for engine in found]

    here, near = ("engine-1", MACHINE, "starting"), ("near", "near-host", "elsewhere")
    assert listed() == [here, ("gone", "gone-host", "silent"), near]
    for name in ("gone", "near"):
        product.operator.call("POST", PATH.format(name))
    assert listed() == [here, near], "a lease that has not expired is its machine's"


def test_the_figures_of_an_engine_are_shown(product: InProcess) -> None:
    grammars = GrammarStats(masks=5, tenants=(("ten_1", 0.5),))
    stats = make_stats(grammars=grammars, drafts=DraftStats(accepted_tokens=7))
    product.use(FakeEngines(seen=[EngineFigures("engine", "ready", None, stats, 0)]))
    (shown,) = product.operator.call("GET", "/admin/v1/engines").json()["data"]
    grammars = shown["figures"]["grammars"]
    assert (grammars["masks"], grammars["tenants"]) == (5, {"ten_1": 0.5})
    assert shown["figures"]["drafts"]["accepted_tokens"] == 7


def test_suspects_are_listed_without_their_texts_and_cleared(product: InProcess) -> None:
    place = "/admin/v1/engines/suspects"
    product.use(FakeEngines(suspects=make_suspects()))
    (shown,) = product.operator.call("GET", place).json()["data"]
    assert abs(shown.pop("expires_at") - now_ms() / 1000 - LIFETIME_S) < 60
    assert shown == {
        "object": "engine.suspect", "fingerprint": "1234567890", "tenant_id": "ten_9",
        "base_model": "base", "state": "suspect", "deaths": 2,
    }  # fmt: skip
    assert product.operator.call("DELETE", f"{place}/1234567890").json()["data"] == []
    again = product.operator.call("DELETE", f"{place}/1234567890")
    assert (again.status_code, again.json()["error"]["param"]) == (404, "fingerprint")
    product.use(FakeEngines())


def test_an_engine_that_is_there_is_not_lost(product: InProcess) -> None:
    database = product.gateway.database
    hold = make_hold(make_price(database), engine_id="engine-1", expires_at_ms=NOW_MS + 1)
    insert_holds(database, hold)
    answer = product.operator.call("POST", PATH.format("engine-1"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "engine_is_there")
    assert database.read_sync(lambda conn: holds.get_hold(conn, hold.request_id)) == hold


def test_every_figure_of_an_engine_is_in_its_answer() -> None:
    pairs = (EngineStats, EngineStatsAnswer), (TierStats, TierFigures)
    others = (GrammarStats, GrammarFigures), (DraftStats, DraftFigures)
    for figures, answer in (*pairs, *others):
        assert {field.name for field in dataclasses.fields(figures)} == set(answer.model_fields)
