"""A name's base model, while base models come, go, and are replaced."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import EngineDeadError
from registry.errors import Conflict, NotFound
from registry.ref import BaseRef
from server.database.database import LedgerUnavailable
from server.inference.base_follower import MAX_MODELS, BaseFollower
from server.inference.bases import Bases
from server.inference.served_base import ServedBase
from server.pool.control_files import BaseEntry, ModelChanges, bases_file, changes_file, wanted_file
from server.pool.keeper import Keeper
from server.pool.pool_settings import PoolSettings
from server.pool.running import Running, RunningRequest
from tests.server.fake_engines import FakeEngines


def request(request_id: str = "r", tenant_id: str = "ten") -> RunningRequest:
    return RunningRequest(request_id, tenant_id, 1, 9, is_cold=False, engine="engine")


class World:
    """A follower, whose supervisor is the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.is_ledger_away = False
        self.bases = Bases()
        self.engines: dict[str, Any] = {}
        self.announced: list[str] = []
        self.follower = self.start_follower()

    def start_follower(self) -> BaseFollower:
        def connect(entry: BaseEntry) -> FakeEngines:
            self.engines[entry.home] = FakeEngines()
            return self.engines[entry.home]

        async def announce(base: ServedBase) -> None:
            if self.is_ledger_away:
                raise LedgerUnavailable("away")
            self.announced.append(base.model_id)

        return BaseFollower(self.bases, self.folder, self.serve, connect, announce)

    def serve(self, entry: BaseEntry) -> ServedBase:
        if entry.model_dir == "damaged":
            raise OSError("cannot be read")
        engines = FakeEngines(is_ready=False)
        self.engines[entry.home] = engines
        running, home = Running(), Path(entry.home)
        model: Any = SimpleNamespace(
            model_id=entry.name, base_revision=entry.base_revision, variant="its only one"
        )
        nothing: Any = None
        return ServedBase(
            entry.home, model, nothing, nothing, engines, running, nothing, nothing,
            Keeper(engines, running, home, PoolSettings(model="base"), lambda: self.now_s),
        )  # fmt: skip

    def entry(self, name: str, number: int = 1, **fields: Any) -> BaseEntry:
        home = self.folder / f"{name}-{number}"
        home.mkdir(exist_ok=True)
        given = {"model_dir": "model", "base_revision": f"{name} {number}"} | fields
        return BaseEntry(name=name, home=str(home), **given)

    def tell(self, *entries: BaseEntry) -> None:
        """Write what a supervisor writes, and have the follower act on it."""
        bases_file(self.folder).write(entries)
        self.follower._listed.look_again()
        self.look()

    def look(self) -> None:
        async def look() -> None:
            await self.follower.look()
            for base in self.bases:
                base.keeper.turn()

        asyncio.run(look())

    def home_of(self, name: str) -> str | None:
        base = self.bases.named(name)
        return base.home if base else None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_name_means_its_base_model_and_the_first_is_the_default(world: World) -> None:
    a, b = world.entry("a"), world.entry("b")
    world.tell(a, b)
    assert [base.model_id for base in world.bases.current] == ["a", "b"]
    assert world.bases.default.model_id == "a"
    assert (world.home_of("b"), world.home_of("c")) == (b.home, None)
    assert world.bases.models.names == ("a", "b")
    found = world.bases.serving(BaseRef("b 1", "b", "its only one"))
    assert found is not None
    assert found.model_id == "b"
    assert world.bases.serving(BaseRef("c 1", "c", "its only one")) is None
    assert world.announced == ["a", "b"]


def test_a_replaced_model_serves_until_its_successor_has_an_engine(world: World) -> None:
    old, new = world.entry("a"), world.entry("a", 2)
    world.tell(old)
    world.engines[old.home].is_ready = True
    former = replace(old, is_former=True)
    world.bases.follow((new, former))
    assert world.home_of("a") == old.home, "the new one is being loaded"
    world.tell(new, former)
    assert world.home_of("a") == old.home
    assert world.bases.serving(BaseRef("a 2", "a", "its only one")) is None
    assert wanted_file(Path(old.home)).read() is None
    world.engines[new.home].is_ready = True
    base = world.bases.at(old.home)
    assert base is not None
    base.running.add(request())
    world.look()
    assert world.home_of("a") == new.home
    assert world.bases.models.revisions == ("a 2",)
    assert wanted_file(Path(old.home)).read() is None, "a request is under way there"
    base.running.remove(request())
    world.look()
    assert wanted_file(Path(old.home)).read() is None, "others may have chosen it before"
    world.now_s += 5
    world.look()
    assert wanted_file(Path(old.home)).read() == 0
    world.tell(new)
    assert world.bases.at(old.home) is None


def test_a_removed_model_is_no_model_any_more_and_ends_its_requests(world: World) -> None:
    a, b = world.entry("a"), world.entry("b")
    world.tell(a, b)
    base = world.bases.at(b.home)
    assert base is not None
    base.running.add(request())
    world.tell(a, replace(b, is_former=True))
    assert world.home_of("b") is None
    assert world.bases.serving(BaseRef("b 1", "b", "its only one")) is None
    assert world.bases.models.names == ("a",)
    assert world.bases.num_running == 1
    asyncio.run(world.bases.abort_all())
    assert world.engines[b.home].aborted == ["r"]


def test_journals_of_a_model_that_is_gone_are_read_without_the_model(world: World) -> None:
    left = world.entry("a", is_former=True, model_dir="")
    world.tell(left)
    assert world.bases.engine_ids() == ["engine-1"]
    assert list(world.bases) == []
    world.engines[left.home].names = ("a", "b")
    with pytest.raises(EngineDeadError, match="b is a fake without a journal"):
        asyncio.run(world.bases.read_journal("id of b", 0, 10))
    world.tell()
    assert world.bases.engine_ids() == []
    with pytest.raises(EngineDeadError, match="the engine is gone"):
        asyncio.run(world.bases.read_journal("id of b", 0, 10))


def test_a_model_that_cannot_be_loaded_is_failed_and_tried_again_when_it_changes(
    world: World,
) -> None:
    damaged = world.entry("a", model_dir="damaged")
    preparing = world.entry("b", model_dir="")
    refused = world.entry("c", model_dir="", problem="there is no such folder")
    world.tell(damaged, preparing, refused)
    states = [world.follower.state_of(entry) for entry in (damaged, preparing, refused)]
    assert states == ["failed", "preparing", "failed"]
    mended = replace(damaged, model_dir="model")
    world.tell(mended)
    assert world.follower.state_of(mended) == "starting"


def test_a_drained_model_takes_nothing_keeps_its_place_and_stays_drained(world: World) -> None:
    entry = world.entry("a")
    world.tell(entry)
    world.follower.drain("a")
    world.look()
    assert wanted_file(Path(entry.home)).read() == 0
    assert world.follower.state_of(entry) == "drained"
    assert world.home_of("a") == entry.home
    again = World(world.folder)
    asyncio.run(again.follower.start())
    again.tell(entry)
    assert again.follower.state_of(entry) == "drained"
    again.follower.resume("a")
    world.look()
    assert world.follower.state_of(entry) == "starting", "another gateway takes it over"
    again.look()
    assert wanted_file(Path(entry.home)).read() == 1
    assert changes_file(world.folder).read().drained == ()


def test_what_is_added_is_written_for_the_supervisor_and_replaced_under_its_name(
    world: World,
) -> None:
    world.tell(world.entry("a"))
    assert world.follower.add({"model": "/models/b"}, "b")
    assert not world.follower.add({"model": "/models/b"}, "b")
    assert world.follower.add({"model": "/models/b", "quantization": "int8"}, "b")
    (table,) = changes_file(world.folder).read().added
    assert table == {"model": "/models/b", "quantization": "int8", "model_name": "b"}
    world.tell(world.entry("a"), world.entry("b", origin="added"))
    world.follower.remove("b")
    assert changes_file(world.folder).read() == ModelChanges()


def test_models_of_the_settings_are_changed_in_the_settings(world: World) -> None:
    world.tell(world.entry("a"))
    for change in (lambda: world.follower.remove("a"), lambda: world.follower.add({}, "a")):
        with pytest.raises(Conflict, match="SIGHUP"):
            change()
    for refused in (world.follower.drain, world.follower.resume, world.follower.remove):
        with pytest.raises(NotFound):
            refused("unknown")


def test_no_more_models_are_added_than_may_be(world: World) -> None:
    tables = tuple({"model": "m", "model_name": f"m{number}"} for number in range(MAX_MODELS))
    changes_file(world.folder).write(ModelChanges(added=tables))
    asyncio.run(world.follower.start())
    with pytest.raises(Conflict, match="remove one first"):
        world.follower.add({"model": "m"}, "one-more")
    assert world.follower.add({"model": "another"}, "m0"), "a replacement is no model more"


def test_a_model_that_comes_while_the_ledger_is_away_is_served_when_it_is_back(
    world: World,
) -> None:
    a, b = world.entry("a"), world.entry("b")
    world.tell(a)
    world.is_ledger_away = True
    world.tell(a, b)
    assert world.home_of("b") is None
    world.is_ledger_away = False
    world.look()
    assert world.home_of("b") == b.home
    assert world.announced == ["a", "b"]
