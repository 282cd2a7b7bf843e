"""The parts of one gateway process: made at its start (`server.assembly`), handed out by `deps`.

Only `app`, which starts and ends the parts, and `deps`, which hands single parts to endpoints, know
this class. Everything else takes the parts that it uses.
"""

import functools
from dataclasses import dataclass, field

from registry.catalog.catalog import Catalog
from registry.storage.free_space import FreeSpace
from registry.storage.storage import Storage
from registry.uploads.rules import RegistryLimits
from server.accounts.admin_key import AdminKey
from server.accounts.identities import Identities
from server.accounts.key_uses import KeyUses
from server.accounts.sessions import Sessions
from server.adapters.prover import Prover
from server.adapters.spool import Spool
from server.adapters.upload_builds import UploadBuilds
from server.api.metrics import Metrics
from server.api.neighbours import Neighbours
from server.api.recordings import Recorder
from server.api.serving import Serving
from server.billing.audit.auditor import Auditor
from server.billing.failures import Failures
from server.billing.ledger_probe import LedgerProbe
from server.billing.price_tags import PriceTags
from server.billing.receipts.signing import Signer
from server.billing.settler import Settler
from server.billing.statements import Statements
from server.database.chores import Chores
from server.database.database import Database
from server.database.leases import Leases
from server.inference.admission import Admission
from server.inference.base_follower import BaseFollower
from server.inference.bases import Bases
from server.inference.cancels import Cancels
from server.inference.drain import Drain
from server.inference.encoders import Encoders
from server.inference.generation import Generation
from server.inference.limit_refusals import LimitRefusals
from server.inference.routes import Routes
from server.inference.ticket import Timeouts
from server.launch.settings import Settings
from server.limits.inflow import Inflow
from server.limits.learned import LearnedTokens
from server.limits.memory import MemoryLimiter
from server.traces.spans import Tracer
from server.webhooks.urls import UrlRules


@dataclass(frozen=True)
class Gateway:
    """The parts, one field for each job."""

    settings: Settings
    database: Database
    pepper: str = field(repr=False)
    metrics: Metrics
    # Base models, and the requests under way.
    bases: Bases
    follower: BaseFollower
    drain: Drain
    # Callers and their limits.
    admin_key: AdminKey
    identities: Identities
    sessions: Sessions
    key_uses: KeyUses
    limiter: MemoryLimiter
    limit_refusals: LimitRefusals
    # Adapters.
    catalog: Catalog
    storage: Storage
    registry_limits: RegistryLimits
    upload_builds: UploadBuilds
    prover: Prover
    space: FreeSpace
    spool: Spool
    routes: Routes
    # Money.
    price_tags: PriceTags
    signer: Signer
    settler: Settler
    failures: Failures
    statements: Statements
    auditor: Auditor
    ledger_probe: LedgerProbe
    # Webhooks.
    webhook_rules: UrlRules
    # Answers that are kept for a repeated request.
    recorder: Recorder
    # Work that only one of all gateways does.
    leases: Leases
    chores: Chores
    # Bodies on their way in.
    bodies: Inflow
    # The other gateways of this machine, if there are any.
    neighbours: Neighbours | None = None
    # The export of traces, if an endpoint is set.
    tracer: Tracer | None = None
    encoders: Encoders = field(default_factory=Encoders)
    learned_tokens: LearnedTokens = field(default_factory=LearnedTokens)

    @functools.cached_property
    def serving(self) -> Serving:
        """The part that answers requests for completions."""
        settings = self.settings
        admission = Admission(
            bases=self.bases,
            drain=self.drain,
            encoders=self.encoders,
            catalog=self.catalog,
            database=self.database,
            price_tags=self.price_tags,
            limiter=self.limiter,
            learned_tokens=self.learned_tokens,
            timeouts=Timeouts(
                first_token_s=settings.first_token_timeout_s,
                request_s=settings.request_timeout_s,
                hold_lifetime_s=settings.hold_lifetime_s,
            ),
            count_refusal=self.metrics.count_refusal,
        )
        generation = Generation(
            database=self.database,
            limiter=self.limiter,
            learned_tokens=self.learned_tokens,
            failures=self.failures,
            hold_lifetime_s=settings.hold_lifetime_s,
            cached_token_weight=settings.cached_token_weight,
            metrics=self.metrics.of_requests,
            count_move=self.metrics.moves.inc,
        )
        return Serving(
            admission,
            generation,
            self.recorder,
            settings.pad_events_to,
            self.routes,
        )

    @functools.cached_property
    def cancels(self) -> Cancels:
        return Cancels(self.database, self.bases)
