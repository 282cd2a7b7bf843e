"""What one gateway process holds: made at start, handed to every endpoint."""

import functools
import hashlib
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from engine.messages import LeaseLow
from registry.base_model import BaseModel
from registry.catalog import Catalog
from registry.completion import complete_upload
from registry.proof import Proof
from registry.ref import AdapterRef
from registry.storage_url import open_storage
from registry.upload_rules import RegistryLimits
from registry.uploads import Uploads
from registry.validate import AdapterLimits
from server.admin_key import AdminKey
from server.auditor import INTERVAL_S as AUDIT_INTERVAL_S
from server.auditor import Auditor
from server.budget_watch import INTERVAL_S as BUDGETS_INTERVAL_S
from server.budget_watch import BudgetWatch
from server.chores import Chores
from server.completions import Completions
from server.database import Database
from server.drain import Drain
from server.engines import Engines
from server.failures import Failures
from server.idempotency import CLAIM_SLACK_MS, PRUNE_INTERVAL_S, IdempotencyKeys
from server.identities import Identities
from server.kept import INTERVAL_S as KEPT_INTERVAL_S
from server.kept import Kept
from server.leases import Leases
from server.ledger_probe import LedgerProbe
from server.limiter.epochs import Epochs
from server.limiter.learned import LearnedTokens
from server.limiter.memory import MemoryLimiter
from server.limiter.redis_states import RedisStates
from server.limiter.rules import SEAT_SLACK_S, Limiter
from server.limiter.shared import SharedLimiter
from server.load import Load
from server.metrics import Metrics
from server.price_tags import PriceTags
from server.proving import Prover
from server.recordings import Recorder
from server.running import Running
from server.scheduled import TURN_S as EXPORTS_TURN_S
from server.scheduled import ScheduledExports
from server.secrets_store import Secrets
from server.settings import Settings
from server.settler import Settler
from server.signing import Signer
from server.spool import Spool
from server.statements import Statements
from server.token_leases import TokenLeases
from server.tokenizer import Tokenizer
from server.webhook_delivery import INTERVAL_S as WEBHOOKS_INTERVAL_S
from server.webhook_delivery import WebhookDelivery
from server.webhook_urls import UrlRules


@dataclass(frozen=True)
class Gateway:
    """One field a job; none of them knows another, but for the settler, which reads and posts.

    key_uses: when keys were last used, in Unix milliseconds, until it is written down.
    work_dir: where uploads lie while they are received, built and proved; empty at start.
    """

    settings: Settings
    database: Database
    identities: Identities
    price_tags: PriceTags
    base: BaseModel
    catalog: Catalog
    uploads: Uploads
    completions: Completions
    prover: Prover
    tokenizer: Tokenizer
    engines: Engines
    settler: Settler
    signer: Signer
    leases: Leases
    failures: Failures
    idempotency: IdempotencyKeys
    recorder: Recorder
    statements: Statements
    auditor: Auditor
    ledger_probe: LedgerProbe
    chores: Chores
    limiter: Limiter
    running: Running
    load: Load
    token_leases: TokenLeases
    drain: Drain
    metrics: Metrics
    pepper: str = field(repr=False)
    admin_key: AdminKey
    work_dir: Path
    spool: Spool = field(default_factory=Spool)
    learned_tokens: LearnedTokens = field(default_factory=LearnedTokens)
    key_uses: dict[str, int] = field(default_factory=dict)

    @classmethod
    def build(cls, settings: Settings, model_dir: Path, admin_key: AdminKey) -> "Gateway":
        """Everything but what needs a running event loop (see `app.lifespan`)."""
        data_dir = settings.data_dir
        database = Database(settings.database_url, data_dir=data_dir)
        base = BaseModel.load(model_dir, settings.model_id, data_dir / "cache")
        limits = RegistryLimits(
            adapter=AdapterLimits(
                max_rank=settings.max_rank, max_adapter_bytes=settings.max_adapter_bytes
            ),
            max_versions=settings.max_versions,
            max_uploads_per_hour=settings.max_uploads_per_hour,
        )
        storage = open_storage(settings.storage_url)
        work_dir = _emptied(data_dir / "work")
        secrets = Secrets.load(data_dir)
        settler: Settler | None = None

        def settle_soon() -> None:
            if settler is not None:
                settler.wake()

        catalog = Catalog(base)
        uploads = Uploads(catalog, storage, limits, work_dir=work_dir)
        running = Running()
        token_leases = TokenLeases(database, running)

        def extend_lease(low: LeaseLow) -> None:
            token_leases.extend_soon(engines, low)

        engines = Engines(data_dir / "engine" / "engine.sock", settle_soon, extend_lease)
        load = Load(
            running,
            max_queued=settings.max_waiting,
            max_wait_s=settings.first_token_timeout_s,
            default_share=settings.max_queue_share,
        )
        signer = Signer(bytes.fromhex(secrets.receipt_signing_key))
        leases = Leases(database)
        budgets = BudgetWatch(database)
        rules = UrlRules(settings.webhook_allow_http, settings.webhook_allow_private)
        webhooks = WebhookDelivery(database, secrets.pepper, rules)
        settler = Settler(
            database, signer, leases, engines.read_journal, engine_ids=engines.engine_ids
        )
        statements = Statements(database, signer)
        kept = Kept(database, signer)
        exports = ScheduledExports(database, storage, work_dir)
        failures = Failures(database, signer)
        claim_ms = int(settings.request_timeout_s * 1000) + CLAIM_SLACK_MS
        idempotency = IdempotencyKeys(database, claim_ms=claim_ms)
        metrics = Metrics(engines, settler)
        auditor = Auditor(database, settler, metrics)

        async def prove(adapter: AdapterRef, object_path: Path) -> Proof:
            proof = await engines.prove(adapter, object_path)
            metrics.note_proof(proof)
            return proof

        return cls(
            settings=settings,
            database=database,
            identities=Identities(database, secrets.pepper),
            price_tags=PriceTags(database),
            base=base,
            catalog=catalog,
            uploads=uploads,
            completions=Completions(functools.partial(complete_upload, uploads, database.begin)),
            prover=Prover(
                database,
                uploads,
                prove,
                is_ready=lambda: engines.is_ready,
                work_dir=work_dir,
            ),
            tokenizer=Tokenizer(model_dir),
            engines=engines,
            settler=settler,
            signer=signer,
            leases=leases,
            failures=failures,
            idempotency=idempotency,
            recorder=Recorder(idempotency, failures),
            statements=statements,
            auditor=auditor,
            ledger_probe=LedgerProbe(database),
            chores=_chores(
                leases, kept, statements, exports, auditor, idempotency, budgets, webhooks
            ),
            limiter=_limiter(settings, database, secrets.pepper),
            running=running,
            load=load,
            token_leases=token_leases,
            drain=Drain(load, running, engines, settings.drain_timeout_s),
            metrics=metrics,
            pepper=secrets.pepper,
            admin_key=admin_key,
            work_dir=work_dir,
        )

    @property
    def vocabulary_size(self) -> int:
        """Token ids below it are served: those that both the tokenizer and the model have."""
        return min(len(self.tokenizer.vocabulary), self.base.config["vocab_size"])

    @property
    def max_model_len(self) -> int:
        """Of the engine once it is there; until then nothing is tokenized for it."""
        welcome = self.engines.welcome
        return welcome.max_model_len if welcome else 0


def _limiter(settings: Settings, database: Database, pepper: str) -> Limiter:
    """Of one gateway, or of all that share a Redis."""
    if settings.redis_url is None:
        return MemoryLimiter(path=settings.data_dir / "limits.json")
    # The same for all gateways of an installation, and another for others on the same Redis.
    name = hashlib.sha256(pepper.encode()).hexdigest()[:16]
    return SharedLimiter(
        name,
        RedisStates(settings.redis_url, deadline_s=settings.redis_deadline_s),
        Epochs(database, f"gw-{uuid.uuid4()}"),
        max_lease_ms=int((settings.request_timeout_s + SEAT_SLACK_S) * 1000),
    )


def _chores(
    leases: Leases,
    kept: Kept,
    statements: Statements,
    exports: ScheduledExports,
    auditor: Auditor,
    idempotency: IdempotencyKeys,
    budgets: BudgetWatch,
    webhooks: WebhookDelivery,
) -> Chores:
    """What one of the gateways on a database does: (name, turn, seconds between turns)."""
    return Chores(
        leases,
        [
            ("kept", kept.turn, KEPT_INTERVAL_S),
            ("statements", statements.turn, 600.0),
            ("exports", exports.turn, EXPORTS_TURN_S),
            ("audit", auditor.turn, AUDIT_INTERVAL_S),
            ("idempotency", idempotency.prune, PRUNE_INTERVAL_S),
            ("budgets", budgets.turn, BUDGETS_INTERVAL_S),
            ("webhooks", webhooks.turn, WEBHOOKS_INTERVAL_S),
        ],
    )


def _emptied(folder: Path) -> Path:
    """What a killed gateway left there belongs to nobody."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
