"""Engines on a Ray cluster behind a gateway: they come back after a death, and grow and shrink.

The cluster is one node of its own; `make test-ray` runs this, `make test` does not.
"""

import asyncio
import contextlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from engine.steps.meter import TokenMeter
from server.billing.tables import usage_events
from server.database.database import Database
from server.pool.control_files import wanted_file
from tests.e2e.base_models import tables
from tests.e2e.bill import check_streams
from tests.e2e.stack import Stack
from tests.e2e.streams import Streamed, engines, run_streams, wait_until_ready
from tests.ray.stack import HEAL_S, Cluster, ClusterStack, short, start
from tests.tiny_models import LLAMA3_ROPE, save_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"
)

NUM_STREAMS = 40
NUM_TOKENS = 100


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with short() as folder:
        yield folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model", rope=LLAMA3_ROPE)


@pytest.fixture(scope="module")
def pool(
    cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterStack]:
    """A pool of fake engines; its last test stops its gateway."""
    folder = tmp_path_factory.mktemp("pool")
    stack = ClusterStack(cluster, folder, model, fake_engine=True, max_engines=3)
    try:
        start(stack, cluster.environment)
        yield stack
    finally:
        stack.stop()


def test_what_dies_on_the_cluster_ends_its_own_streams_and_the_bill_is_exact(
    pool: ClusterStack,
) -> None:
    ids = {name: engine["engine_id"] for name, engine in engines(pool).items()}
    cut_steps, streams, lost = [], [], {}
    for kill, victim in (
        ("engine-2", "engine-2"),
        ("actor 1", "engine"),
        ("coordinator", None),
        ("placer", None),
    ):
        # Each kill has a tenant: a request that was running at two deaths would be tried alone.
        tenant = pool.tenant(f"before-{kill.replace(' ', '-')}")
        got = asyncio.run(
            run_streams(tenant, NUM_STREAMS, partial(pool.kill, kill), max_tokens=NUM_TOKENS)
        )
        if victim:
            cut_steps.append(TokenMeter.read(pool.data_dir / victim / "meter")[2:])
        lost |= dict.fromkeys((g.request_id for g in got), victim and ids[victim])
        streams += got
        wait_until_ready(pool, 2)
        assert {name: it["engine_id"] for name, it in engines(pool).items()} == ids
    pool.settled_events(len(streams))
    events = check_streams(pool, streams, NUM_TOKENS, lost, cut_steps)
    assert len(events) == len(streams)
    served_by = Counter(event["engine_id"] for event in events.values())
    assert min(served_by.values()) >= len(streams) / 5


def test_the_pool_grows_and_shrinks_while_it_serves(pool: ClusterStack) -> None:
    tenant = pool.tenant("globex")
    wanted_file(pool.data_dir).write(3)
    wait_until_ready(pool, 3)
    third = engines(pool)["engine-3"]["engine_id"]

    async def shrink() -> list[Streamed]:
        async with asyncio.TaskGroup() as group:
            streams = group.create_task(run_streams(tenant, NUM_STREAMS, max_tokens=NUM_TOKENS))
            await asyncio.sleep(1.0)
            wanted_file(pool.data_dir).write(2)
        return streams.result()

    streams = asyncio.run(shrink())
    assert {got.finish_reason for got in streams} == {"length"}, "who leaves ends what it has"

    def settled() -> dict[str, int]:
        """Return the streams' completion tokens by request; other events may be posted, too."""
        events = {e["request_id"]: e["completion_tokens"] for e in pool.settled_events(0)}
        return {got.request_id: events[got.request_id] for got in streams}

    pool.wait(lambda: len(settled()) == NUM_STREAMS)
    assert set(settled().values()) == {NUM_TOKENS}
    # A stand-in takes the engine's place until no hold on it can be open any more.
    pool.wait(lambda: engines(pool)["engine-3"]["state"] == "leaving", HEAL_S)
    pool.wait(lambda: any(name.startswith("retired/3/") for name in pool.cluster.actors(pool)))
    with contextlib.closing(Database(data_dir=pool.data_dir, exclusive=False)) as database:
        query = sa.select(usage_events.c.engine_id).filter_by(tenant_id=tenant.tenant_id)
        served_by = Counter(database.read_sync(lambda conn: conn.scalars(query).all()))
    assert len(served_by) == 3
    assert served_by[third] >= NUM_STREAMS / 6


def test_a_pool_whose_gateway_has_gone_leaves_the_cluster(
    cluster: Cluster, pool: ClusterStack
) -> None:
    pool.stop()
    pool.wait(lambda: not cluster.actors(pool), HEAL_S)


def test_a_gateway_brings_one_cluster_for_all_its_models_and_takes_it_along(
    model: Path, short_folder: Path, tmp_path: Path
) -> None:
    models = tables({"base": model, "other": model})
    stack = Stack(
        tmp_path / "stack", model, fake_engine=True, ray="local", models=models, max_model_len=512
    )
    there = {"RAY_TMPDIR": str(short_folder), "TMPDIR": str(short_folder)}
    try:
        start(stack, there | {"RAY_USAGE_STATS_ENABLED": "0"})
        tenant = stack.tenant("acme")
        for name in ("base", "other"):
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True}
            answer = tenant.http.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 9
        servers = [it for it in processes_in(short_folder) if b"/gcs_server\0" in it]
        assert len(servers) == 1
    finally:
        stack.stop()
    stack.wait(lambda: not processes_in(short_folder))


def processes_in(folder: Path) -> list[bytes]:
    """Return the command lines that name a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if str(folder).encode() in (command := (entry / "cmdline").read_bytes()):
                found.append(command)
    return found
