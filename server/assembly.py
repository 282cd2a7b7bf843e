"""Builds the parts of a gateway, all that can be made without a running event loop."""

import functools
import hashlib
import shutil
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection

from engine.errors import EngineAwayError
from registry.catalog.catalog import Catalog
from registry.checks.validate import AdapterLimits
from registry.checks.validator import Validator
from registry.errors import Overloaded, Unavailable
from registry.ref import AdapterRef, BaseRef
from registry.storage.free_space import FreeSpace, WorkDir
from registry.storage.storage import Storage, folder_of
from registry.storage.url import open_storage
from registry.uploads.build import UploadBuilder
from registry.uploads.parts import pending_bytes
from registry.uploads.proof import Proof
from registry.uploads.rules import RegistryLimits
from server.accounts import audit_log
from server.accounts.admin_key import AdminKey
from server.accounts.identities import Identities
from server.accounts.key_uses import KeyUses
from server.accounts.sessions import Sessions
from server.adapters.prover import Prover
from server.adapters.spool import Spool
from server.adapters.upload_builds import UploadBuilds
from server.api import errors
from server.api.bodies import MAX_JSON_BYTES
from server.api.gateway import Gateway
from server.api.metrics import Metrics
from server.api.neighbours import Neighbours
from server.api.recordings import Recorder
from server.billing.audit.auditor import INTERVAL_S as AUDIT_INTERVAL_S
from server.billing.audit.auditor import Auditor
from server.billing.base_revisions import name_base
from server.billing.budget_watch import INTERVAL_S as BUDGETS_INTERVAL_S
from server.billing.budget_watch import BudgetWatch
from server.billing.budgets import HAS_HARD_BUDGET
from server.billing.exports.schedules import TURN_S as EXPORTS_TURN_S
from server.billing.exports.schedules import ScheduledExports
from server.billing.failures import Failures
from server.billing.ledger_probe import LedgerProbe
from server.billing.old_holds import delete_old_holds
from server.billing.price_tags import PriceTags
from server.billing.receipts.signing import Signer
from server.billing.settler import Settler
from server.billing.statements import Statements
from server.billing.storage_charges import INTERVAL_S as KEPT_INTERVAL_S
from server.billing.storage_charges import Kept
from server.billing.unanswered import Unanswered
from server.database.chores import Chores
from server.database.clock import now_ms
from server.database.database import Database
from server.database.leases import Leases
from server.inference.base_follower import BaseFollower
from server.inference.base_maker import BaseMaker
from server.inference.bases import Bases
from server.inference.drain import Drain
from server.inference.idempotency import (
    CLAIM_SLACK_MS,
    PRUNE_INTERVAL_S,
    IdempotencyKeys,
    take_over_key,
)
from server.inference.limit_refusals import LimitRefusals
from server.inference.routes import Routes
from server.inference.served_base import ServedBase
from server.launch.secrets import Secrets
from server.launch.settings import Settings
from server.limits.inflow import Inflow
from server.limits.memory import MemoryLimiter
from server.pool.control_files import BaseEntry, numbered
from server.pool.keys import InstallationKeys
from server.traces.spans import Tracer
from server.webhooks.delivery import INTERVAL_S as WEBHOOKS_INTERVAL_S
from server.webhooks.delivery import WebhookDelivery
from server.webhooks.sender import HttpSender
from server.webhooks.urls import UrlRules

_PROVER = "prover"
"""Stands for a tenant's id where proofs wait for a base model to wake."""


def assemble(
    settings: Settings, entries: Sequence[BaseEntry], admin_key: AdminKey, number: int = 1
) -> Gateway:
    """Build a gateway; `server.api.app` starts its parts.

    entries: the base models that there are, as the supervisor lists them.   number: of this gateway
    among those of the machine, each of which has files of its own.
    """
    data_dir = settings.data_dir
    space = FreeSpace(settings.disk_reserve_bytes)
    work = WorkDir(_work_dir(settings, number), space)
    secrets = Secrets.load(data_dir)
    database = Database(settings.database_url, data_dir=data_dir)
    storage = open_storage(settings.storage_url)
    signer = Signer(bytes.fromhex(secrets.receipt_signing_key))
    leases = Leases(database)
    maker = BaseMaker(
        settings,
        database,
        InstallationKeys.of(secrets.pepper).gateway.secret,
        data_dir / "cache",
        on_end=lambda: settler.wake(),
        number=number,
    )
    bases = Bases(entries, [maker.base(entry) for entry in entries if entry.model_dir])
    tracer = _tracer(settings, number)
    settler = Settler(
        database, signer, leases, bases.read_journal, engine_ids=bases.engine_ids, tracer=tracer
    )
    catalog = Catalog(bases.models)
    limits = _registry_limits(settings)
    builder = UploadBuilder(
        begin=database.begin,
        catalog=catalog,
        storage=storage,
        limits=limits,
        validator=Validator(limits.adapter),
        work=work,
        now_ms=now_ms,
    )
    metrics = Metrics(bases, settler, settings.metrics_aliases)
    limit_refusals = LimitRefusals(database, count=metrics.count_refusal)
    limiter = _limiter(settings, number, secrets.pepper, limit_refusals)
    metrics.gauges["limiter_degraded"].set_function(lambda: limiter.is_degraded)
    metrics.gauges["disk_left_bytes"].set_function(lambda: space.left_bytes(data_dir))
    metrics.gauges["disk_size_bytes"].set_function(lambda: space.look(data_dir).size_bytes)
    auditor = Auditor(database, settler, metrics.note_audit)
    unanswered = Unanswered(data_dir / numbered("unanswered", number))
    failures = Failures(database, signer, unanswered, take_over_key)
    statements = Statements(database, signer, note_waits=metrics.note)
    idempotency = IdempotencyKeys(
        database, claim_ms=int(settings.request_timeout_s * 1000) + CLAIM_SLACK_MS
    )
    rules = UrlRules(settings.webhook_allow_http, settings.webhook_allow_private)
    sender = HttpSender(secrets.pepper, rules)
    identities = Identities(database, secrets.pepper, has_hard_budget=HAS_HARD_BUDGET)
    chores = [
        ("kept", Kept(database, signer).turn, KEPT_INTERVAL_S),
        ("statements", statements.turn, 600.0),
        ("exports", ScheduledExports(database, storage, work).turn, EXPORTS_TURN_S),
        ("audit", auditor.turn, AUDIT_INTERVAL_S),
        ("idempotency", idempotency.prune, PRUNE_INTERVAL_S),
        ("holds", lambda: delete_old_holds(database), 60.0),
        ("budgets", BudgetWatch(database).turn, BUDGETS_INTERVAL_S),
        ("webhooks", WebhookDelivery(database, sender).turn, WEBHOOKS_INTERVAL_S),
    ]
    if days := settings.audit_log_retention_days:
        chores.append(("audit log", functools.partial(audit_log.prune, database, days), 3600.0))
    return Gateway(
        settings=settings,
        database=database,
        identities=identities,
        sessions=Sessions(database, secrets.pepper, admin_key, identities),
        routes=Routes(database),
        price_tags=PriceTags(database),
        bases=bases,
        follower=_follower(data_dir, database, bases, maker),
        catalog=catalog,
        storage=storage,
        registry_limits=limits,
        upload_builds=UploadBuilds(builder.build),
        prover=_prover(
            database, catalog, storage, bases, metrics, _proving(settings, work, number)
        ),
        space=space,
        spool=Spool(
            work,
            folder_of(storage),
            lambda tenant_id: database.read(lambda conn: pending_bytes(conn, tenant_id)),
            max_pending_bytes=settings.max_pending_bytes,
            max_pending_share=settings.max_pending_share,
        ),
        settler=settler,
        signer=signer,
        leases=leases,
        failures=failures,
        recorder=Recorder(idempotency, failures),
        statements=statements,
        auditor=auditor,
        ledger_probe=LedgerProbe(database),
        chores=Chores(leases, chores),
        limiter=limiter,
        limit_refusals=limit_refusals,
        webhook_rules=rules,
        drain=Drain(bases, settings.drain_timeout_s),
        metrics=metrics,
        pepper=secrets.pepper,
        admin_key=admin_key,
        key_uses=KeyUses(database),
        bodies=_bodies(settings),
        neighbours=(
            Neighbours(data_dir, number, settings.gateways, metrics)
            if settings.gateways > 1
            else None
        ),
        tracer=tracer,
    )


def _follower(data_dir: Path, database: Database, bases: Bases, maker: BaseMaker) -> BaseFollower:
    async def announce(base: ServedBase) -> None:
        """Let the ledger know the name of the base model."""
        model = base.model

        def write(conn: Connection) -> None:
            for digest in (model.base_revision, model.variant):
                name_base(conn, digest, model.model_id)

        await database.write(write)

    return BaseFollower(bases, data_dir, maker.base, maker.leftover, announce)


def _bodies(settings: Settings) -> Inflow:
    """The memory for bodies that are being read: for 64 of the longest, half of them a tenant's."""
    limit_bytes = 64 * max(settings.max_body_bytes, MAX_JSON_BYTES)
    return Inflow(limit_bytes, limit_bytes // 2, errors.bodies_busy)


def _registry_limits(settings: Settings) -> RegistryLimits:
    return RegistryLimits(
        adapter=AdapterLimits(
            max_rank=settings.max_rank, max_adapter_bytes=settings.max_adapter_bytes
        ),
        max_versions=settings.max_versions,
        max_uploads_per_hour=settings.max_uploads_per_hour,
    )


def _prover(
    database: Database,
    catalog: Catalog,
    storage: Storage,
    bases: Bases,
    metrics: Metrics,
    work: WorkDir,
) -> Prover:
    async def prove(ref: BaseRef, adapter: AdapterRef, object_path: Path, alone: bool) -> Proof:
        if (base := bases.serving(ref)) is None:
            raise EngineAwayError("no engine has this base model")
        try:
            with base.keeper.visit():
                await base.keeper.wake(_PROVER)
                proof = await base.engines.prove(adapter, object_path, alone=alone)
        except (Unavailable, Overloaded) as error:
            raise EngineAwayError("the base model is at rest") from error
        metrics.note_proof(proof)
        return proof

    return Prover(database, catalog, storage, prove, is_ready=lambda: bases.is_ready, work=work)


def _work_dir(settings: Settings, number: int) -> Path:
    """The folder where files are on their way."""
    if settings.spool_dir is None:
        return _emptied(settings.data_dir / numbered("work", number))
    return _own_folder(settings, settings.spool_dir, number)


def _proving(settings: Settings, work: WorkDir, number: int) -> WorkDir:
    """The folder where engines read adapters to prove, on a cluster one in the pool's folder."""
    if settings.pool_dir is None:
        return work
    return WorkDir(_own_folder(settings, settings.pool_dir / "proofs", number), work.space)


def _own_folder(settings: Settings, shared: Path, number: int) -> Path:
    """The folder of this gateway alone in a shared one; it empties the folder at its start."""
    place = numbered(f"{socket.gethostname()}:{settings.data_dir}", number)
    return _emptied(shared / hashlib.sha256(place.encode()).hexdigest()[:16])


def _limiter(
    settings: Settings, number: int, pepper: str, refusals: LimitRefusals
) -> MemoryLimiter:
    """The limiter of one gateway, or the one that all gateways with the same Redis share."""
    if settings.redis_url is None:
        return MemoryLimiter(path=settings.data_dir / "limits.json", note_refusal=refusals.note)
    # Its library takes memory and 0.3 s, and imports OpenTelemetry where that is installed.
    from server.limits.redis_calls import RedisCalls
    from server.limits.shared import SharedLimiter

    # The name is the same for all gateways of an installation, and differs between installations.
    name = hashlib.sha256(pepper.encode()).hexdigest()[:16]
    return SharedLimiter(
        name,
        RedisCalls(settings.redis_url, deadline_s=settings.redis_deadline_s),
        f"gw-{uuid.uuid4()}",
        place=(min(number, settings.gateways) - 1, settings.gateways),
        note_refusal=refusals.note,
    )


def _tracer(settings: Settings, number: int) -> Tracer | None:
    if settings.otlp_endpoint is None:
        return None
    # An extra, whose import takes memory and 0.3 s.
    from server.traces.otlp import OtlpTracer

    instance = f"{socket.gethostname()}/{numbered('gateway', number)}"
    return OtlpTracer(settings.otlp_endpoint, settings.trace_sample_ratio, instance)


def _emptied(folder: Path) -> Path:
    """Make the folder anew, without the files that a killed gateway left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder
