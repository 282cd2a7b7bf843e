"""What one gateway process holds: made at start (`server.assembly`), handed to every endpoint."""

from dataclasses import dataclass, field
from pathlib import Path

from registry.base_model import BaseModel
from registry.catalog import Catalog
from registry.uploads import Uploads
from server.accounts.admin_key import AdminKey
from server.accounts.identities import Identities
from server.adapters.proving import Prover
from server.adapters.spool import Spool
from server.adapters.upload_completion import Completions
from server.api.metrics import Metrics
from server.api.recordings import Recorder
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
from server.inference.drain import Drain
from server.inference.idempotency import IdempotencyKeys
from server.inference.load_shedding import Load
from server.inference.token_leases import TokenLeases
from server.launch.settings import Settings
from server.limits.learned import LearnedTokens
from server.limits.rules import Limiter
from server.pool.engines import Engines
from server.pool.first_tokens import FirstTokens
from server.pool.running import Running
from server.text.tokenizer import Tokenizer


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
    first_tokens: FirstTokens = field(default_factory=FirstTokens)
    learned_tokens: LearnedTokens = field(default_factory=LearnedTokens)
    key_uses: dict[str, int] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """Token ids below it are served: those that both the tokenizer and the model have."""
        return min(len(self.tokenizer.vocabulary), self.base.config["vocab_size"])

    @property
    def max_model_len(self) -> int:
        """Of the engines once they are there; until then nothing is tokenized for them."""
        return self.engines.max_model_len
