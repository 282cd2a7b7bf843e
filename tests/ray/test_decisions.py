"""Decisions of placer, coordinator and actor, without a cluster."""

import importlib.util
import json
import tempfile
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("the extra `ray` is not installed", allow_module_level=True)

import ray
import ray.exceptions
import ray.util

from engine.leaving import mark_settled
from engine.wire.encoding import write_vocabulary
from server.cluster import coordinator
from server.cluster.actor import EngineActor
from server.cluster.coordinator import LINGER_S, SILENCE_S, Coordinator, Slot
from server.cluster.placer import Placer, PoolRefused
from server.cluster.pool import Placed, Pool
from server.launch.engine_template import EngineTemplate
from server.launch.homes import Home
from server.launch.placer_config import PlacerConfig
from server.launch.settings import Settings
from server.pool.control_files import Member, members_file, wanted_file
from server.pool.keys import InstallationKeys

KEYS = InstallationKeys.of("1" * 64)


class FakeActor:
    """An actor whose methods have Ray's form; their return values are what `ray.get` returns."""

    def __init__(self, **methods):
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=method))


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    def get(answer, timeout=None):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([r for r in refs if r != "never"], []))
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "cluster_resources", dict)


def make_config(tmp_path, **changes):
    write_vocabulary(tmp_path / "vocabulary", [b"a"])
    settings = Settings(model="m", data_dir=tmp_path, ray="local", engines=2, max_engines=4)
    engine_config = {"base_revision": "base-1", "vocabulary_path": str(tmp_path / "vocabulary")}
    settings = settings.model_copy(update=changes)
    home = Home(tmp_path)
    return PlacerConfig.of(settings, KEYS, engine_config, home)


# ---- the placer ----


def make_placer(tmp_path, monkeypatch, said):
    """Make a placer with a fake coordinator. said: the coordinator's answers to polls, in order.

    Returns the placer and what the coordinator saw: the number of joins, and the wanted numbers.
    """
    seen = SimpleNamespace(joins=0, wanted=[])

    def join(placer_id, pool):
        seen.joins += 1
        return "another model" if pool["base_revision"] == "refused" else None

    def poll(placer_id, wanted):
        seen.wanted.append(wanted)
        return said.pop(0)

    coordinator = FakeActor(join=join, poll=poll)
    maker = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: coordinator))
    monkeypatch.setattr(ray, "remote", lambda _: maker)
    (tmp_path / "pool").mkdir(exist_ok=True)
    return Placer(make_config(tmp_path)), seen


def answer(**addresses):
    names = {name.replace("_", "-"): address for name, address in addresses.items()}
    return {"addresses": names, "problems": []}


def test_an_engine_whose_address_is_not_known_for_the_moment_stays_where_it_was(
    tmp_path, monkeypatch
):
    said = [
        answer(engine="tcp://a:1", engine_2=""),
        answer(engine="", engine_2="tcp://b:2"),
        answer(engine_2="tcp://b:3"),
    ]
    placer, _ = make_placer(tmp_path, monkeypatch, said)
    members = []
    for _ in range(3):
        placer.turn()
        members.append({m.name: m.address for m in members_file(tmp_path).read()})
    assert members == [
        {"engine": "tcp://a:1"},
        {"engine": "tcp://a:1", "engine-2": "tcp://b:2"},
        {"engine-2": "tcp://b:3"},
    ]


def test_a_placer_that_comes_back_remembers_the_cluster_and_not_a_pool_on_one_machine(
    tmp_path, monkeypatch
):
    far = Member("engine-2", "tcp://b:2", KEYS.engine.public)
    (tmp_path / "pool").mkdir()
    members_file(tmp_path).write([Member("engine", "ipc:///engine.sock"), far])
    placer, _ = make_placer(tmp_path, monkeypatch, [answer(engine="", engine_2="")])
    placer.turn()
    assert members_file(tmp_path).read() == (far,)


def test_a_coordinator_that_died_or_was_started_again_is_joined_again(tmp_path, monkeypatch):
    died, is_away = ray.exceptions.ActorDiedError(), ray.exceptions.RayError("it is slow")
    said = [answer(), None, is_away, answer(), died, answer()]
    placer, seen = make_placer(tmp_path, monkeypatch, said)
    for _ in range(6):
        placer.turn()
    assert seen.joins == 3
    assert members_file(tmp_path).read() == ()


@pytest.mark.parametrize(
    ("written", "wanted"), [(None, 2), (0, 0), (1, 2), (3, 3), (9, 4), ("damaged", 2)]
)
def test_what_is_wanted_lies_between_the_bounds(tmp_path, monkeypatch, written, wanted):
    placer, seen = make_placer(tmp_path, monkeypatch, [answer()])
    if written is not None:
        wanted_file(tmp_path).path.write_text(json.dumps(written))
    placer.turn()
    assert seen.wanted == [wanted]


def test_who_is_refused_changes_nothing_of_what_engines_are_started_with(tmp_path, monkeypatch):
    placer, _ = make_placer(tmp_path, monkeypatch, [])
    placer._pool = replace(placer._pool, base_revision="refused")
    with pytest.raises(PoolRefused, match="another model"):
        placer.turn()
    assert not EngineTemplate.path(tmp_path).exists()


# ---- the coordinator ----


class World:
    """Actors by number, and the coordinator's turns at times that the test gives."""

    def __init__(self, tmp_path, monkeypatch):
        monkeypatch.setattr(coordinator, "_place", self._place)
        monkeypatch.setattr(coordinator, "_find_slots", dict)
        monkeypatch.setattr(coordinator.threading, "Thread", self._no_thread)
        self.pool = Pool.of_config(make_config(tmp_path), has_gpus=False)
        self.folder = tmp_path
        self.roles = {}
        self.answers = {}
        self.now = 1000.0
        monkeypatch.setattr(coordinator.time, "monotonic", lambda: self.now)
        self.coordinator = Coordinator()

    def _no_thread(self, **_):
        return SimpleNamespace(start=lambda: None)

    def _place(self, pool, number, kind):
        (self.folder / ("engine" if number == 1 else f"engine-{number}") / "journal").mkdir(
            parents=True, exist_ok=True
        )

        def tend(role):
            self.roles[number, kind] = role
            said = Placed(f"tcp://{number}:1", is_gone=role == "leave")
            return self.answers.get(number, asdict(said))

        return Slot(kind, pool.template_id, FakeActor(tend=tend), is_new=True)

    def ask(self, wanted, placer="p", pool=None):
        refusal = self.coordinator.join(placer, asdict(pool or self.pool))
        self.coordinator.poll(placer, wanted)
        return refusal

    def turn(self, times=3):
        """Take turns; return the kinds of the slots by number, or True if the pool is over."""
        for _ in range(times):
            is_over = self.coordinator._turn(self.now)
        return is_over or {number: slot.kind for number, slot in self.coordinator._slots.items()}


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def test_engines_are_as_many_as_the_most_that_a_gateway_wants(world):
    world.ask(2)
    assert world.turn() == {1: "engine", 2: "engine"}
    world.ask(3, placer="other")
    assert world.turn() == {1: "engine", 2: "engine", 3: "engine"}
    world.coordinator.goodbye("other")
    assert world.turn() == {1: "engine", 2: "engine", 3: "retired"}


def test_in_the_place_of_who_has_left_somebody_stands_until_all_is_settled(world):
    world.ask(2)
    world.turn()
    world.ask(1)
    assert world.turn() == {1: "engine", 2: "retired"}
    mark_settled(world.folder / "engine-2")
    assert world.turn() == {1: "engine"}


def test_a_pool_of_which_nothing_is_wanted_is_at_rest_and_comes_back(world):
    world.ask(2)
    world.turn()
    world.ask(0)
    assert world.turn() == {1: "retired", 2: "retired"}
    for name in ("engine", "engine-2"):
        mark_settled(world.folder / name)
    assert world.turn() == {}
    assert world.coordinator.poll("p", 0)["addresses"] == {}
    world.ask(1)
    assert world.turn() == {1: "engine"}


def test_who_is_wanted_again_waits_until_its_folder_is_free(world):
    world.ask(2)
    world.turn()
    world.ask(1)
    world.turn()
    world.answers[2] = asdict(Placed("tcp://2:1"))  # the retired engine is not gone yet
    world.ask(2)
    assert world.turn() == {1: "engine", 2: "retired"}
    assert world.roles[2, "retired"] == "leave"
    del world.answers[2]
    assert world.turn() == {1: "engine", 2: "engine"}


def test_an_engine_that_no_node_has_room_for_can_go_and_the_operator_hears_of_it(world):
    world.answers[2] = "never"
    world.ask(2)
    assert world.turn() == {1: "engine", 2: "engine"}
    world.now += 11
    world.ask(2)
    world.turn()
    (problem,) = world.coordinator.poll("p", 2)["problems"]
    assert "room" in problem
    (world.folder / "engine-2" / "journal").rmdir()
    world.ask(1)
    assert world.turn() == {1: "engine"}


def test_an_actor_that_is_away_keeps_its_place_and_one_that_is_dead_is_replaced(world):
    world.ask(1)
    world.turn()
    world.answers[1] = ray.exceptions.ActorUnavailableError("it restarts", b"0" * 16)
    before = world.coordinator._slots[1]
    world.turn()
    assert world.coordinator._slots[1] is before
    assert world.coordinator.poll("p", 1)["addresses"] == {"engine": "tcp://1:1"}
    world.answers[1] = ray.exceptions.ActorDiedError()
    world.turn(2)
    assert world.coordinator._slots.get(1) is not before


def test_a_pool_dissolves_soon_after_the_last_goodbye(world):
    world.ask(2)
    world.turn()
    world.coordinator.goodbye("p")
    world.now += LINGER_S - 1
    assert world.turn() == {1: "engine", 2: "engine"}
    world.now += 2
    assert world.turn() is True


def test_a_gateway_that_fell_silent_is_waited_for_much_longer(world):
    world.ask(1)
    world.turn()
    world.now += SILENCE_S - 1
    assert world.turn() == {1: "engine"}
    world.now += 2
    assert world.turn() is True


def test_a_coordinator_finds_the_actors_that_its_predecessor_left(monkeypatch):
    def get_actor(name):
        if name == "engine/3/t/c":
            raise ValueError("it has ended")
        return name

    names = ["coordinator", "engine/1/t/a", "retired/2/t/b", "engine/3/t/c"]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: names)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    assert coordinator._find_slots() == {
        1: Slot("engine", "t", "engine/1/t/a"),
        2: Slot("retired", "t", "retired/2/t/b"),
    }


def test_another_model_is_refused_while_somebody_is_there_and_replaces_all_once_alone(world):
    world.ask(1)
    world.turn()
    before = world.coordinator._slots[1]
    other = replace(world.pool, base_revision="b2", template_id="t2")
    assert "base_revision" in world.ask(1, placer="other", pool=other)
    assert world.turn() == {1: "engine"}
    assert world.coordinator._slots[1] is before
    world.coordinator.goodbye("other")
    assert world.ask(1, pool=other) is None
    world.turn()
    assert world.coordinator._slots[1].template_id == "t2"


# ---- the actor ----


def test_an_actor_says_why_its_process_ends_and_is_gone_once_that_has_left(tmp_path, monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = make_config(tmp_path, model="/none")
    actor = EngineActor(asdict(Pool.of_config(config, has_gpus=False)), 2, "engine")
    assert "node 10.0.0.7: the data_dir (or pool_dir)" in actor.tend("serve")["problem"]
    config.template.publish(tmp_path)

    def wait_for(role, expected):
        until = time.monotonic() + 60
        while not expected(placed := actor.tend(role)):
            assert time.monotonic() < until, placed
            time.sleep(0.02)

    wait_for("serve", lambda placed: "There is no model '/none'" in placed["problem"])
    wait_for("leave", lambda placed: placed["is_gone"])
