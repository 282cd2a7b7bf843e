"""Factories for the gateway's tests: tenants, keys, holds, end records."""

from engine.wire.records import EndRecord, JournalRecords, ResidencyRecord
from server.accounts.keys import create_key
from server.accounts.lineage import ApiKey
from server.accounts.tenants import STANDARD, Tenant, TenantLimits, create_tenant
from server.billing import ledger
from server.billing.budgets import Budget, BudgetKind, Enforcement, set_budget
from server.billing.holds import Hold, insert_hold
from server.billing.prices import Price, ensure_price
from server.billing.rating import amount_nanousd
from server.billing.receipts.receipt import Receipt
from server.billing.receipts.rows import iterate_receipts, select_receipts
from server.billing.receipts.signing import Signer
from server.database.database import Database

NOW_MS = 1_770_000_000_000
PEPPER = "pepper"
ENGINE = "engine-1"
SIGNER = Signer(bytes(range(32)))


class Clock:
    """A clock that moves only when the test sets `now`, in the unit of whoever reads it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_tenant(
    database: Database, name: str = "acme", plan: str = STANDARD, **limits: int | float
) -> Tenant:
    given = TenantLimits(**limits)
    return database.write_sync(
        lambda c: create_tenant(c, name, now_ms=NOW_MS, limits=given, plan=plan)
    )


def make_key(database: Database, tenant: Tenant, **options: object) -> tuple[ApiKey, str]:
    options = {"now_ms": NOW_MS, **options}
    return database.write_sync(
        lambda c: create_key(c, tenant.tenant_id, "a key", PEPPER, **options)
    )


def make_price(database: Database) -> Price:
    return database.write_sync(lambda c: ensure_price(c, NOW_MS))


def limit_budget(
    database: Database,
    tenant_id: str,
    amount_nanousd: int,
    kind: BudgetKind = "monthly",
    enforcement: Enforcement = "hard",
) -> None:
    what = {"tenant_id": tenant_id, "kind": kind, "enforcement": enforcement}
    budget = Budget(**what, amount_nanousd=amount_nanousd)
    database.write_sync(lambda conn: set_budget(conn, budget, now_ms=NOW_MS))


def make_hold(price: Price, request_id: str = "r1", **fields: object) -> Hold:
    tokens = {"num_prompt_tokens": 7, "token_lease": 33, **fields}
    values = {
        "request_id": request_id,
        "tenant_id": "ten_1",
        "key_id": "key1",
        "model": "base",
        "price_version": price.price_version,
        "amount_nanousd": amount_nanousd(
            tokens["num_prompt_tokens"], 0, tokens["token_lease"], price
        ),
        "engine_id": ENGINE,
        "created_at_ms": NOW_MS,
        "expires_at_ms": NOW_MS + 150_000,
        **tokens,
    }
    return Hold(**values)


def insert_holds(database: Database, *holds: Hold) -> None:
    database.write_sync(lambda conn: [insert_hold(conn, hold) for hold in holds])


def make_end(seq: int, request_id: str = "r1", **fields: object) -> EndRecord:
    values = {
        "seq": seq,
        "at": NOW_MS / 1000 + seq,
        "number": seq,
        "total_prompt_tokens": 0,
        "total_cached_tokens": 0,
        "total_completion_tokens": 0,
        "request_id": request_id,
        "tenant_id": "ten_1",
        "adapter_digest": None,
        "base_revision": "b" * 64,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 0,
        "num_completion_tokens": 5,
        "finish_reason": "stop",
        "stop_cause": "eos",
        "output_sha256": "0" * 64,
        "started_at": NOW_MS / 1000,
        "first_token_at": NOW_MS / 1000 + 0.5,
        **fields,
    }
    return EndRecord(**values)


def post_ends(
    database: Database,
    *records: EndRecord | ResidencyRecord,
    engine_id: str = ENGINE,
    now_ms: int = NOW_MS,
) -> ledger.PostResult:
    """Post records as a settler does."""
    return database.write_sync(lambda c: ledger.post(c, SIGNER, engine_id, records, now_ms))


def receipts_of(database: Database) -> list[Receipt]:
    """All receipts, ordered by tenant."""
    return database.read_sync(lambda c: list(iterate_receipts(c, select_receipts())))


def make_journal(*records: EndRecord, **fields: object) -> JournalRecords:
    values = {
        "engine_id": ENGINE,
        "ends": records,
        "last_seq": max((record.seq for record in records), default=0),
        "complete": True,
        **fields,
    }
    return JournalRecords(**values)
