"""The sweep's processes: the real engine process around a FakeRunner, and the real gateway."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import uvicorn

from engine.config import EngineConfig
from server.accounts.admin_key import AdminKey
from server.api.app import create_app
from server.assembly import assemble
from server.billing.failures import Failures
from server.billing.settler import Settler, SettlerConfig
from server.billing.tables import usage_events
from server.billing.unanswered import Unanswered
from server.database.database import Database
from server.database.leases import Leases
from server.inference.idempotency import take_over_key
from server.launch.settings import Settings
from server.limits.memory import MemoryLimiter
from server.pool.control_files import numbered
from tests.crash import points
from tests.crash.points import Kill, PointedApp, PointedDisk, Points
from tests.engine import fake_engine
from tests.engine.fakes import FakeDrafter
from tests.server.bases import demo_entries

DEMO = Path(__file__).parents[2] / "demo" / "model"
STEP_S = 0.002
SILENCE_S = 1.5
"""Silence after which the engine ends a gateway's requests; 10 s outside of these tests. With 25
processes on two cores, a gateway that lives was silent for 0.6 s.
"""
LEASE_S = 0.5
_MAX_WAITING = 2
"""Requests that may wait in the engine. The gateway supposes more, as where others' requests wait
there too, so the engine refuses some.
"""
_SEGMENT_BYTES = 3000
"""Size of a journal segment, some ten steps: every run begins and deletes segments."""


@dataclass(frozen=True, slots=True)
class Life:
    """One process from its start to its end.

    process: "engine", "gateway", or "gateway-2" beside it.
    waits_for_post: the gateway notes a failure only when the request is in the ledger already.
    has_drafts: the engine's steps may give an answer several tokens.
    """

    process: str
    folder: str
    database_url: str
    kill: Kill | None
    waits_for_post: bool = False
    has_drafts: bool = True

    @classmethod
    def decode(cls, text: bytes) -> "Life":
        fields = json.loads(text)
        fields["kill"] = Kill(**fields["kill"]) if fields["kill"] else None
        return cls(**fields)

    def live(self) -> None:
        folder = Path(self.folder)
        points = Points(self.kill, folder / "killed")
        if self.process == "engine":
            _run_engine(folder, self, points)
        else:
            _run_gateway(folder, self, points)


def socket_of(folder: Path, number: int = 1) -> Path:
    """The Unix socket of gateway number 1, 2 and so on."""
    return folder / f"{numbered('http', number)}.sock"


def settings_for(folder: Path, database_url: str) -> Settings:
    return Settings(
        model=str(DEMO),
        model_name="base",
        data_dir=folder,
        database_url=database_url,
        max_model_len=1024,
        max_num_seqs=4,
        threads=1,
    )


def _run_engine(folder: Path, life: Life, pointed: Points) -> None:
    written = json.loads((folder / "engine.json").read_text())
    config = EngineConfig(**written | {"data_dir": str(folder / "engine")})
    archive = folder / "archive"
    archive.mkdir(exist_ok=True)
    points.point_journal_files(pointed, archive)
    points.point_engine_socket(pointed)
    os.environ["FAKE_STEP_S"] = str(STEP_S)
    fake_engine.serve(
        replace(config, gateway_timeout_s=SILENCE_S, max_waiting=_MAX_WAITING),
        segment_bytes=_SEGMENT_BYTES,
        drafter=FakeDrafter(share_wrong=0.1) if life.has_drafts else None,
        disk=PointedDisk(pointed),
    )


def _run_gateway(folder: Path, life: Life, pointed: Points) -> None:
    settings = settings_for(folder, life.database_url)
    number = int(life.process.partition("-")[2] or 1)
    gateway = assemble(settings, demo_entries(settings), AdminKey("the-operator"), number)
    # A dead gateway's leases end soon; outside of these tests they take 10 s.
    leases = Leases(gateway.database, LEASE_S)
    settler = Settler(
        gateway.database,
        gateway.signer,
        leases,
        gateway.bases.read_journal,
        engine_ids=gateway.bases.engine_ids,
        config=SettlerConfig(poll_s=0.03, void_interval_s=0.05),
    )
    gateway = replace(gateway, leases=leases, settler=settler)
    if number > 1:
        # Outside of these tests several gateways count their limits in Redis.
        path = folder / numbered("limits", number)
        limiter = MemoryLimiter(path=path, note_refusal=gateway.limit_refusals.note)
        gateway = replace(gateway, limiter=limiter)
    if life.waits_for_post:
        unanswered = Unanswered(folder / numbered("unanswered", number))
        late = LateFailures(gateway.database, gateway.signer, unanswered, take_over_key)
        gateway = replace(gateway, failures=late)
    points.point_gateway_socket(pointed)
    points.point_commits(pointed, gateway.database.engine)
    config = uvicorn.Config(
        PointedApp(create_app(gateway), gateway, pointed),
        uds=str(socket_of(folder, number)),
        log_level="warning",
        access_log=False,
        ws="none",
    )
    uvicorn.Server(config).run()


class LateFailures(Failures):
    """Notes a failure only when the request has been posted, as after an outage of the database."""

    def __init__(self, database: Database, *others: Any) -> None:
        super().__init__(database, *others)
        self._posts = database

    async def note(self, request_id: str) -> None:
        query = sa.select(usage_events.c.event_id).where(usage_events.c.request_id == request_id)
        while await self._posts.read(lambda conn: conn.scalar(query)) is None:
            pass
        await super().note(request_id)
