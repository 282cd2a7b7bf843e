"""A gateway killed at any step keeps what it acknowledged and leaves nothing else behind."""

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest

from server.database.database import Database
from tests.registry.crash_child import SCRIPT, look, run, use
from tests.registry.factories import make_base


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """Calls a function in a process of its own, forked from one that has the imports already."""
    base = make_base(tmp_path_factory.mktemp("crash") / "base")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([use.__module__])

    def fork(do, *arguments):
        with ProcessPoolExecutor(1, context, use, (base,)) as pool:
            return pool.submit(do, *arguments).result()

    return fork


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crash-empty")
    database = Database(data_dir=folder)
    database.migrate()
    database.close()
    return folder


@pytest.fixture(scope="module")
def undisturbed(fork, empty, tmp_path_factory):
    """The script's number of boundaries, and the state after a run without a kill."""
    folder = tmp_path_factory.mktemp("crash-whole") / "world"
    shutil.copytree(empty, folder)
    return fork(run, folder), fork(look, folder)


def result(found):
    return {key: found[key] for key in ("versions", "aliases", "open_uploads", "orphans")}


def test_the_script_comes_to_what_it_should(undisturbed):
    points, found = undisturbed
    assert points > 100
    assert found["acknowledged"] == len(SCRIPT)
    assert found["wrong"] == []
    assert found["aliases"] == {"pirate": {"latest": "3", "prod": "1"}}
    assert sorted(state for *_, state in found["versions"]) == ["deleted", *["ready"] * 3]
    assert (found["open_uploads"], found["orphans"]) == ([], [])


@pytest.mark.parametrize(
    "stride",
    [61, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
    ids=["some", "all"],
)
def test_killed_at_any_step_nothing_is_lost_and_going_on_comes_to_the_same(
    fork, empty, undisturbed, tmp_path, stride
):
    points, whole = undisturbed
    for kill_at in range(1, points + 1, stride):
        folder, left = tmp_path / f"world-{kill_at}", tmp_path / "left"
        shutil.copytree(empty, folder)
        with pytest.raises(BrokenProcessPool):
            fork(run, folder, kill_at)
        shutil.copytree(folder, left)
        found = fork(look, left)
        assert found["wrong"] == [], f"killed at {kill_at}"
        assert (found["open_uploads"], found["orphans"]) == ([], []), f"killed at {kill_at}"
        shutil.rmtree(left)
        fork(run, folder)
        after = fork(look, folder)
        assert after["wrong"] == [], f"continued after being killed at {kill_at}"
        assert result(after) == result(whole), f"continued after being killed at {kill_at}"
        shutil.rmtree(folder)
