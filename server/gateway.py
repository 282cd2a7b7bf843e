"""What one gateway process holds: made at start (`server.assembly`), handed to every endpoint."""

from dataclasses import dataclass, field
from pathlib import Path

from registry.base_model import BaseModel
from registry.catalog import Catalog
from registry.uploads import Uploads
from server.admin_key import AdminKey
from server.auditor import Auditor
from server.chores import Chores
from server.completions import Completions
from server.database import Database
from server.drain import Drain
from server.failures import Failures
from server.first_tokens import FirstTokens
from server.idempotency import IdempotencyKeys
from server.identities import Identities
from server.leases import Leases
from server.ledger_probe import LedgerProbe
from server.limiter.learned import LearnedTokens
from server.limiter.rules import Limiter
from server.load import Load
from server.metrics import Metrics
from server.pool.engines import Engines
from server.price_tags import PriceTags
from server.proving import Prover
from server.recordings import Recorder
from server.running import Running
from server.settings import Settings
from server.settler import Settler
from server.signing import Signer
from server.spool import Spool
from server.statements import Statements
from server.token_leases import TokenLeases
from server.tokenizer import Tokenizer


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
