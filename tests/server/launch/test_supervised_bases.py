"""The base models of `chorale serve` as they come, are replaced and go, with fake models."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.leaving import forget_settled, mark_settled
from server.launch.errors import ServeError
from server.launch.homes import Home, home_of
from server.launch.loaded_base import LoadedBase
from server.launch.local_engines import ThisMachine
from server.launch.settings import Settings
from server.launch.supervised_bases import SupervisedBases
from server.launch.supervisor import ChildSpec
from server.pool.control_files import (
    ModelChanges,
    bases_file,
    changes_file,
    wanted_file,
)

GATEWAY = ChildSpec("gateway", ("gateway",), {})
REVISIONS = {"a": "aaaaaaaa1", "b": "bbbbbbbb2", "c": "cccccccc3"}
A, B, C = ({"model": name} for name in "abc")


class FakeTokenizer:
    vocabulary = (b"a",)
    eos_token_ids = (0,)


def load(settings):
    """Stand for reading a model's folder; "missing" is none."""
    if settings.model == "missing":
        raise ServeError("There is no model 'missing': no such folder.")
    if settings.model == "odd":
        raise RecursionError("deep")
    base = SimpleNamespace(path=f"/{settings.model}", base_revision=REVISIONS[settings.model])
    return LoadedBase(settings, base, FakeTokenizer())


class World:
    """A data directory and its base models. A model is loaded when `finish` is called."""

    def __init__(self, data_dir):
        data_dir.mkdir()
        self.data_dir = data_dir
        self._work = []
        self.load = load

    def start(self, *tables, **given):
        self._work.clear()
        self.bases = SupervisedBases(
            self.settings(*tables, **given),
            ThisMachine(),
            lambda: [GATEWAY],
            load=lambda settings: self.load(settings),
            start=self._work.append,
        )

    def settings(self, *tables, **given):
        return Settings(models=tables, data_dir=self.data_dir, **{"threads": 1, **given})

    def finish(self):
        """Load all that is to be loaded."""
        self.bases()
        while self._work:
            self._work.pop()()
            self.bases()

    @property
    def children(self):
        return [f"{spec.name} {spec.command[2]}" for spec in self.bases()[:-1]]

    @property
    def entries(self):
        self.bases()
        return bases_file(self.data_dir).read()

    def home(self, slug):
        return self.data_dir / "bases" / slug

    def add(self, *tables):
        changes_file(self.data_dir).write(ModelChanges(tables))
        self.finish()

    def run(self, folder):
        """Let an engine have run, so that it leaves a journal."""
        (folder / "journal").mkdir(parents=True, exist_ok=True)
        forget_settled(folder)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "d")


def told(world):
    """Return what the gateway knows: name, home's last part, what is out of the ordinary."""
    return [
        (e.name, Path(e.home).name, "former" if e.is_former else e.problem) for e in world.entries
    ]


# ---- homes ----


def test_the_first_model_lives_where_a_single_one_does_and_the_others_beside_it(world):
    world.start(A, {**B, "engines": 2})
    assert world.children == [
        "fetcher lora.fetch", "engine engine",
        "b-bbbbbbbb.fetcher lora.fetch", "b-bbbbbbbb.engine engine", "b-bbbbbbbb.engine-2 engine",
    ]  # fmt: skip
    assert world.bases()[-1] is GATEWAY
    assert told(world) == [("a", "d", ""), ("b", "b-bbbbbbbb", "")]
    assert (world.home("b-bbbbbbbb") / "b-bbbbbbbb.engine-2.json").exists()


def test_an_entry_has_the_settings_of_its_model_and_no_secret(world):
    world.start(A, {**B, "max_num_seqs": 3}, database_url="postgresql://u:secret@h/d")
    assert "secret" not in bases_file(world.data_dir).path.read_text()
    given = Settings.model_validate(
        world.settings(A, B, database_url="postgresql://u:secret@h/d").model_dump(mode="json")
    )
    first, second = (given.of_base(entry.settings) for entry in world.entries)
    assert (first.model, first.max_num_seqs, first.models) == ("a", None, ())
    assert (second.model, second.max_num_seqs) == ("b", 3)
    assert second.database_url == "postgresql://u:secret@h/d"


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("SmolLM2-135M", "smollm2-135m-01234567"),
        ("org/Model_v1.5", "org-model-v1-5-01234567"),
        ("x" * 40, "x" * 24 + "-01234567"),
        ("...", "model-01234567"),
    ],
)
def test_a_home_is_named_after_its_model_and_revision(tmp_path, name, slug):
    home = home_of(tmp_path, name, "0123456789", taken=set())
    assert (home.folder, home.prefix) == (tmp_path / "bases" / slug, f"{slug}.")
    taken = {home.folder, home_of(tmp_path, name, "0123456789", {home.folder}).folder}
    assert home_of(tmp_path, name, "0123456789", taken).slug == f"{slug}-3"


def test_a_home_whose_sockets_would_have_too_long_paths_is_refused(tmp_path):
    length = 100 - len("/engine/engine.sock")
    fits = Path("/" + "x" * (length - 1))
    Home(fits).check_sockets(1)
    with pytest.raises(ServeError, match="too long for the sockets"):
        Home(fits).check_sockets(2)


# ---- at the start ----


def test_a_model_of_the_settings_that_cannot_be_served_ends_the_start(world):
    with pytest.raises(ServeError, match="missing"):
        world.start(A, {"model": "missing"})


def test_models_that_were_added_before_come_back_to_their_homes(world):
    world.start(A)
    world.add(B)
    world.run(world.home("b-bbbbbbbb") / "engine")
    world.start(A)
    assert told(world) == [("a", "d", ""), ("b", "b-bbbbbbbb", "")]
    assert world.entries[1].model_dir == ""
    world.finish()
    assert world.entries[1].model_dir == "/b"
    assert "b-bbbbbbbb.engine engine" in world.children


@pytest.mark.parametrize("is_removed", [True, False])
def test_what_a_model_left_is_settled_if_it_does_not_come_back(world, is_removed):
    world.start(A)
    world.add(B)
    world.run(world.home("b-bbbbbbbb") / "engine")
    world.start(A)
    assert world.children[2:] == [], "its home waits for it"
    if is_removed:
        world.add()
    else:
        world.load = lambda _: load(Settings(model="missing"))
        world.finish()
        assert "no such folder" in world.entries[1].problem
    assert told(world)[-1] == ("b", "b-bbbbbbbb", "former")
    assert world.children[2:] == ["b-bbbbbbbb.engine engine.retired"]


def test_a_home_that_a_model_of_the_settings_has_is_not_kept_for_an_added_one(world):
    world.start(A)
    world.add({**B, "model_name": "B"})
    assert told(world)[1] == ("B", "b-bbbbbbbb", "")
    world.start(A, B)
    world.finish()
    assert told(world)[1:] == [("b", "b-bbbbbbbb", ""), ("B", "b-bbbbbbbb-2", "")]


def test_what_an_earlier_model_left_is_settled_under_its_name(world):
    world.start(A, {**B, "model_name": "bee"})
    folder = world.home("bee-bbbbbbbb") / "engine"
    world.run(folder)
    world.start(A)
    assert told(world)[1:] == [("bee", "bee-bbbbbbbb", "former")]
    assert (world.entries[1].model_dir, world.entries[1].base_revision) == ("", REVISIONS["b"])
    assert world.children[2:] == ["bee-bbbbbbbb.engine engine.retired"]
    mark_settled(folder)
    world.bases()
    assert told(world) == [("a", "d", "")]
    assert len(world.children) == 2


def test_a_home_is_settled_even_if_nobody_remembers_whose_it_was(world):
    world.start(A, B)
    world.run(world.home("b-bbbbbbbb") / "engine")
    bases_file(world.data_dir).path.write_text("damaged")
    world.start(A)
    assert told(world)[1:] == [("b-bbbbbbbb", "b-bbbbbbbb", "former")]
    assert world.entries[1].base_revision == REVISIONS["b"]


def test_a_model_that_came_back_does_not_stay_at_rest_unless_it_may_sleep(world):
    world.start(A, B, {**C, "sleep_after_s": 60})
    homes = [world.data_dir, world.home("b-bbbbbbbb"), world.home("c-cccccccc")]
    for home in homes:
        wanted_file(home).write(0)
    world.start(A, B, {**C, "sleep_after_s": 60})
    assert [wanted_file(home).read() for home in homes] == [None, None, 0]
    assert "c-cccccccc.engine engine" not in world.children


# ---- while it runs ----


def test_an_added_model_is_loaded_while_the_others_are_tended(world):
    world.start(A)
    changes_file(world.data_dir).write(ModelChanges((B,)))
    assert world.children == ["fetcher lora.fetch", "engine engine"]
    assert told(world) == [("a", "d", ""), ("b", "", "")]
    world.finish()
    assert world.children[2:] == ["b-bbbbbbbb.fetcher lora.fetch", "b-bbbbbbbb.engine engine"]
    entry = world.entries[1]
    assert (entry.origin, entry.model_dir, entry.problem) == ("added", "/b", "")


def test_a_later_model_whose_engine_cannot_start_says_why_and_does_not_end_the_others(world):
    world.start(A)
    world.add(B)
    specs = {spec.name: spec for spec in world.bases()}
    assert {name for name, spec in specs.items() if spec.on_refusal} == {
        "b-bbbbbbbb.fetcher", "b-bbbbbbbb.engine",
    }  # fmt: skip
    specs["b-bbbbbbbb.engine"].on_refusal("it has no such layer")
    assert world.children == ["fetcher lora.fetch", "engine engine"]
    assert told(world) == [("a", "d", ""), ("b", "", "it has no such layer")]
    world.add({**B, "engines": 2})
    assert world.entries[1].problem == ""
    assert len(world.children) == 5


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"model": "missing"}, "no such folder"),
        ({"model": "odd"}, "RecursionError"),
        ({"model": "b", "max_skips": 3}, "max_skips in models.json is no setting of a model"),
        ({"model": "b", "engines": 0}, "engines: "),
        ({"model_name": "b"}, "model: give"),
        ({"model": "b", "engines": 2, "max_engines": 64, "model_name": "x" * 9}, ""),
    ],
)
def test_an_added_model_that_cannot_be_served_has_a_problem_and_is_tried_again(
    world, table, problem
):
    world.start(A)
    world.add(table)
    assert problem in world.entries[1].problem
    assert bool(world.entries[1].model_dir) == (not problem)
    world.add({**B, "model_name": "other"}, table)
    assert world.entries[1].model_dir == "/b", "the next one does not wait for it"


def test_a_model_with_a_problem_is_tried_again_after_a_change(world, monkeypatch):
    world.start(A)
    table = {"model": "late"}
    monkeypatch.setitem(REVISIONS, "late", "dddddddd4")
    monkeypatch.delitem(REVISIONS, "late")
    world.add(table)
    assert "late" in world.entries[1].problem
    REVISIONS["late"] = "dddddddd4"
    world.bases()
    assert world.entries[1].problem, "nothing has changed"
    world.bases.set_models(world.settings(A))
    world.finish()
    assert (world.entries[1].problem, world.entries[1].model_dir) == ("", "/late")


def test_a_removed_model_goes_when_the_gateway_wants_none_of_it_and_all_is_settled(world):
    world.start(A)
    world.add(B)
    home = world.home("b-bbbbbbbb")
    world.run(home / "engine")
    world.add()
    assert told(world) == [("a", "d", ""), ("b", "b-bbbbbbbb", "former")]
    assert "b-bbbbbbbb.engine engine" in world.children
    wanted_file(home).write(0)
    assert "b-bbbbbbbb.engine engine.retired" in world.children
    assert len(world.entries) == 2
    mark_settled(home / "engine")
    world.bases()
    assert told(world) == [("a", "d", "")]
    assert world.children == ["fetcher lora.fetch", "engine engine"]


def test_a_replaced_model_serves_until_the_next_one_is_loaded_and_then_beside_it(world):
    world.start(A)
    world.add(B)
    changes_file(world.data_dir).write(ModelChanges(({**B, "engines": 2},)))
    world.bases()
    assert told(world) == [("a", "d", ""), ("b", "", ""), ("b", "b-bbbbbbbb", "")]
    world.finish()
    assert told(world) == [
        ("a", "d", ""), ("b", "b-bbbbbbbb-2", ""), ("b", "b-bbbbbbbb", "former"),
    ]  # fmt: skip
    names = [child.split()[0] for child in world.children]
    assert len(set(names)) == len(names) == 7
    wanted_file(world.home("b-bbbbbbbb")).write(0)
    world.bases()
    assert told(world) == [("a", "d", ""), ("b", "b-bbbbbbbb-2", "")]


def test_a_replacement_that_cannot_be_served_leaves_the_former_one_in_place(world):
    world.start(A, {**B, "model_name": "b"})
    world.bases.set_models(world.settings(A, {"model": "missing", "model_name": "b"}))
    world.finish()
    assert [(e.name, bool(e.problem), e.is_former) for e in world.entries] == [
        ("a", False, False), ("b", True, False), ("b", False, False),
    ]  # fmt: skip
    world.bases.set_models(world.settings(A, {**B, "model_name": "b"}))
    assert told(world) == [("a", "d", ""), ("b", "b-bbbbbbbb", "")]


def test_settings_that_are_the_same_replace_nothing(world):
    world.start(A, B, max_num_seqs=3)
    before = world.bases()
    world.bases.set_models(world.settings(A, B, max_num_seqs=3))
    assert world.bases() == before
    world.bases.set_models(world.settings(A, B, C, max_num_seqs=3))
    world.finish()
    assert world.bases()[: len(before) - 1] == before[:-1]


def test_a_model_that_moves_from_the_gateways_list_to_the_settings_goes_on(world):
    world.start(A)
    world.add(B)
    before = world.bases()
    world.bases.set_models(world.settings(A, B))
    assert world.bases() == before
    assert [entry.origin for entry in world.entries] == ["settings", "settings"]


def test_the_first_model_may_go_and_its_home_is_not_given_to_another(world):
    world.start(A, B)
    world.run(world.data_dir / "engine")
    world.bases.set_models(world.settings(B, C))
    world.finish()
    assert told(world) == [
        ("b", "b-bbbbbbbb", ""), ("c", "c-cccccccc", ""), ("a", "d", "former"),
    ]  # fmt: skip


# ---- what models share ----


def test_models_take_the_gpus_that_are_free_unless_they_name_theirs(world, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")

    def gpus():
        return {
            spec.name: spec.environment["CUDA_VISIBLE_DEVICES"]
            for spec in world.bases()[:-1]
            if "engine" in spec.name
        }

    world.start({**A, "engines": 2}, {**B, "gpus": ["5"]})
    assert gpus() == {"engine": "4", "engine-2": "6", "b-bbbbbbbb.engine": "5"}
    world.add({**C, "tensor_parallel_size": 2})
    assert "1 engines of 2 GPUs need 2, and there are 1 free" in world.entries[2].problem
    home = world.home("b-bbbbbbbb")
    world.bases.set_models(world.settings({**A, "engines": 2}))
    wanted_file(home).write(0)
    world.finish()
    assert gpus()["c-cccccccc.engine"] == "5,7", "what has gone makes room"


def test_a_single_model_sees_every_gpu_and_a_later_one_gets_another(world, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    world.start(A)
    world.add(B)
    gpus = {s.name: s.environment["CUDA_VISIBLE_DEVICES"] for s in world.bases()[:-1]}
    assert (gpus["engine"], gpus["b-bbbbbbbb.engine"]) == ("4,5", "5")
