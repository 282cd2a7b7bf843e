"""The ledger cannot be written: nothing is served, nothing under way is lost, and service resumes.

The outage has the effects of an hour: all answers under way end meanwhile, and every hold is long
past its expiry when the ledger is back.
"""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bench.process_tree import find_children
from server.billing.audit.run import audit
from server.billing.tables import holds, usage_events
from server.database.database import Database
from tests.e2e.stack import Stack, running
from tests.e2e.streams import StreamThread
from tests.postgres_server import postgres_server

NUM_STREAMS = 8
NUM_TOKENS = 150
STEP_S = "0.01"


Outage = Callable[[], AbstractContextManager[None]]
"""A context in which the ledger cannot be written."""


def expire_all_holds(database: Database) -> None:
    database.write_sync(lambda conn: conn.execute(sa.update(holds).values(expires_at_ms=1)))


def check_outage(stack: Stack, database: Database, outage: Outage) -> None:
    tenant = stack.tenant(outage.__name__)
    http = tenant.http
    short = {"model": "base", "prompt": [7], "max_tokens": 1}
    assert http.post("/v1/completions", json=short).status_code == 200
    streams = [
        StreamThread(tenant, prompt=[7] * 30, max_tokens=NUM_TOKENS) for _ in range(NUM_STREAMS)
    ]
    expire_all_holds(database)
    with outage():
        for _ in range(2):
            refused = http.post("/v1/completions", json=short)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "metering_unavailable"
            assert int(refused.headers["retry-after"]) >= 1
        stack.wait(lambda: stack.operator.get("/ready").status_code == 503)
        parts = stack.operator.get("/ready").json()
        assert (parts["ledger"], parts["engine"]) == (False, True)
        for stream in streams:
            assert stream.usage["completion_tokens"] == NUM_TOKENS
            assert stream.got.finish_reason == "length"
        # There may be one more: the engine may not know yet that the first request is settled.
        stack.wait(lambda: (unsettled(stack) or 0) >= NUM_STREAMS)
    stack.wait_ready()
    stack.wait(lambda: unsettled(stack) == 0)
    assert http.post("/v1/completions", json=short).status_code == 200
    stack.wait(lambda: states(database, tenant.tenant_id) == {"posted": NUM_STREAMS + 2})
    tokens = sa.select(usage_events.c.completion_tokens).filter_by(tenant_id=tenant.tenant_id)
    posted = database.read_sync(lambda conn: list(conn.scalars(tokens)))
    assert sorted(posted) == [1, 1, *[NUM_TOKENS] * NUM_STREAMS]
    report = database.read_sync(lambda conn: audit(conn, engine_dirs=[stack.data_dir / "engine"]))
    database.close()
    assert (report.findings, report.incidents) == ([], {})


def unsettled(stack: Stack) -> float | None:
    (engine,) = stack.operator.get("/admin/v1/engines").json()["data"]
    return engine["figures"] and engine["figures"]["unsettled_records"]


def states(database: Database, tenant_id: str) -> dict[str, int]:
    query = sa.select(holds.c.state, sa.func.count()).where(holds.c.tenant_id == tenant_id)
    query = query.group_by(holds.c.state)
    return dict(database.read_sync(lambda conn: [tuple(row) for row in conn.execute(query)]))


def run_stack(folder: Path, model: Path, **settings: Any) -> AbstractContextManager[Stack]:
    return running(
        folder, model, fake_engine=True, max_model_len=512, environment={"FAKE_STEP_S": STEP_S},
        **settings,
    )  # fmt: skip


def test_a_full_disk_under_sqlite(tmp_path: Path, tiny_model: Path) -> None:
    with run_stack(tmp_path, tiny_model) as stack:

        @contextmanager
        def full() -> Iterator[None]:
            # The kernel refuses every write of the gateway, as with a full disk.
            pid = stack.pid("gateway")
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            try:
                yield
            finally:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

        check_outage(stack, Database(data_dir=tmp_path, exclusive=False), full)


def test_a_postgresql_that_is_frozen(tmp_path: Path, tiny_model: Path) -> None:
    """Connections are accepted, and nothing is answered.

    fleet/test_deployment.py has one that cannot be reached.
    """

    @contextmanager
    def frozen() -> Iterator[None]:
        pids = [server.get_pid(), *find_children(server.get_pid())]  # so that it makes no more
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    # The test suspends the server, so it is one of its own.
    with (
        postgres_server() as server,
        run_stack(tmp_path / "stack", tiny_model, database_url=server.get_uri()) as stack,
    ):
        check_outage(stack, Database(server.get_uri(), data_dir=tmp_path), frozen)
