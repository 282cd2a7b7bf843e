"""Every pair of a base's form, a deed and a way of asking, through the running product.

tests.pairs.table has the axes.
"""

from collections.abc import Iterator
from itertools import groupby

import pytest
import torch

from tests.e2e.stack import Stack, running
from tests.pairs.asks import ASKS, Asked
from tests.pairs.covering import Case
from tests.pairs.models import Models
from tests.pairs.table import WORLD, adapter_of, kind_of, number_of, runs, worlds
from tests.pairs.world import DEEDS, SLEEP_AFTER_S, World
from tests.soak import soak


def name_of(case: Case) -> str:
    return " ".join(case[axis] for axis in WORLD)


def by_world(cases: list[Case]) -> dict[str, list[Case]]:
    """The runs on each base model; those that share an adapter follow one another."""
    return {
        name: sorted(group, key=adapter_of)
        for name, group in groupby(sorted(cases, key=name_of), key=name_of)
    }


RUNS = by_world(runs(worlds()))
MORE = by_world(runs(worlds(strength=3)))
MORE = {name: ours for name, ours in MORE.items() if name not in RUNS}
"""Runs on so many more base models that every three values of theirs occur."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_num_threads(1)
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, models: Models) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("p")  # a path of sockets is short
    with running(folder, models.whole("dense", "tied", "C"), module="tests.pairs.forked") as stack:
        yield stack


@pytest.mark.parametrize(
    ("name", "ours"), [*RUNS.items(), *soak(*MORE.items())], ids=[*RUNS, *MORE]
)
def test_every_pair(name: str, ours: list[Case], stack: Stack, models: Models) -> None:
    case = {axis: ours[0][axis] for axis in WORLD}
    base = models.base(case)
    base_name = f"base-{number_of(case)}"
    settings = dict(base.settings)
    if any(run["deed"] == "wake" for run in ours):
        settings["sleep_after_s"] = SLEEP_AFTER_S
    body = {"name": base_name, "model": str(base.folder), "settings": settings}
    stack.operator.post("/admin/v1/models", json=body).raise_for_status()
    world = World(case, base_name, stack, stack.tenant(base_name), models, base)
    world.wait_served()
    for _, group in groupby(ours, key=adapter_of):
        runs_of_adapter = list(group)
        deed, ask = runs_of_adapter[0]["deed"], runs_of_adapter[0]["ask"]
        model, folder = DEEDS[deed](world, kind_of(ask))
        for run in runs_of_adapter:
            ASKS[run["ask"]](Asked(world, model, folder))
    world.check_bill()
    stack.operator.delete(f"/admin/v1/models/{base_name}").raise_for_status()
