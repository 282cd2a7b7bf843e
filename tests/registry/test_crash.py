"""A gateway killed at any step keeps what it acknowledged and leaves nothing else behind."""

import json
import shutil
import subprocess
import sys

import pytest

from server.database.database import Database
from tests.registry.crash_child import SCRIPT


class Forks:
    """Sends orders to the process of tests.registry.crash_child and returns its answers."""

    def __init__(self, process):
        self._process = process

    def __call__(self, **order):
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "failed" not in answer, f"the child failed: {order}"
        return answer


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    base = tmp_path_factory.mktemp("crash") / "base"
    command = [sys.executable, "-m", "tests.registry.crash_child", str(base)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Forks(process)
        process.stdin.close()


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
    points = fork(do="run", folder=folder, kill_at=0)["points"]
    return points, fork(do="look", folder=folder)


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
        assert fork(do="run", folder=folder, kill_at=kill_at) == {"killed": True}
        shutil.copytree(folder, left)
        found = fork(do="look", folder=left)
        assert found["wrong"] == [], f"killed at {kill_at}"
        assert (found["open_uploads"], found["orphans"]) == ([], []), f"killed at {kill_at}"
        shutil.rmtree(left)
        fork(do="run", folder=folder, kill_at=0)
        after = fork(do="look", folder=folder)
        assert after["wrong"] == [], f"continued after being killed at {kill_at}"
        assert result(after) == result(whole), f"continued after being killed at {kill_at}"
        shutil.rmtree(folder)
