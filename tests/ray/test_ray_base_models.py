"""Two base models behind a gateway, each with a pool of its own on one Ray cluster."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.base_models import (
    DEMO,
    Pair,
    check_a_killed_engine,
    check_answers,
    check_replacing,
    check_waking,
    homes_of,
    tables,
)
from tests.e2e.stack import Stack
from tests.ray.stack import Cluster, ClusterStack, start
from tests.tiny_models import LLAMA3_ROPE, save_adapter, save_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"
)


@pytest.fixture(scope="module")
def pair(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The demo's model and a random one, with an engine each."""
    folder = tmp_path_factory.mktemp("bases")
    dirs = {"base": DEMO / "model", "other": save_model(folder / "other", rope=LLAMA3_ROPE)}
    adapters = {
        "base": {"pirate": DEMO / "adapters" / "pirate"},
        "other": {"alpha": save_adapter(dirs["other"], folder / "alpha", seed=100, r=4)},
    }
    stack = ClusterStack(cluster, folder / "stack", DEMO, engines=1, models=tables(dirs))
    try:
        start(stack, cluster.environment)
        yield Pair.on(stack, dirs, adapters)
    finally:
        stack.stop()


def test_every_model_of_a_cluster_answers_as_peft_does_with_its_own_adapters(pair: Pair) -> None:
    check_answers(pair)


def test_an_engine_that_is_killed_on_a_cluster_ends_its_own_models_streams_and_no_others(
    pair: Pair,
) -> None:
    check_a_killed_engine(pair, "other")


def test_a_model_of_a_cluster_is_replaced_and_removed_under_load_and_no_request_fails(
    pair: Pair, tmp_path: Path
) -> None:
    check_replacing(pair, tmp_path)


def test_a_model_that_sleeps_leaves_the_cluster_and_a_request_brings_it_back(
    cluster: Cluster, pair: Pair
) -> None:
    stack = pair.stack
    body = {
        "name": "sleeper", "model": str(pair.dirs["other"]), "settings": {"sleep_after_s": 1.0},
    }  # fmt: skip
    stack.operator.post("/admin/v1/models", json=body).raise_for_status()
    check_waking(stack, pair.tenant, "sleeper", other="base")
    (home,) = homes_of(stack, "sleeper")
    # A retired engine, which uses no resources, may settle the journal there for two minutes.
    stack.wait(lambda: not has_engine(cluster, stack, home))
    assert [name.split("/")[0] for name in cluster.actors(stack)] == ["coordinator", "engine"]


def has_engine(cluster: Cluster, stack: Stack, home: Path) -> bool:
    """Whether the pool in this home, which has a coordinator, has an actor with resources."""
    kinds = {name.split("/")[0] for name in cluster.actors(stack, home.name)}
    assert "coordinator" in kinds
    return "engine" in kinds
