"""Checks receipts with nothing but the public keys, so that anybody who has receipts can do it.

The values of receipts are checked, so bytes that carry no value may differ: in Parquet, statistics
and offsets that a reader of rows does not need (a third of a small file); in CSV, line ends; in
JSON, spaces and the spelling of escapes. A change of any other byte is found.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.billing import statement_figures
from server.billing.receipts.faults import (
    COUNTS,
    Fault,
    receipt_faults,
    reversal_faults,
    signature_faults,
    type_faults,
)
from server.billing.receipts.receipt import CHARGES, GENESIS, TYPES, Receipt, int_of, sha256_of
from server.billing.receipts.signing import PublicKey
from server.billing.statement_figures import StatementFigures
from server.text.json_object import JsonObject

MAX_FINDINGS = 1000
"""Findings that are kept, and gaps as well; further ones only add to the counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An error in a file. row: row of the file, from 1; None if it concerns the whole file."""

    row: int | None
    tenant_id: str | None = None
    receipt_seq: int | None = None
    entry_id: int | None = None
    request_id: str | None = None
    field: str | None = None
    message: str

    def __str__(self) -> str:
        named = {
            "row": self.row,
            "receipt": self.receipt_seq,
            "entry": self.entry_id,
            "request": self.request_id,
            "field": self.field,
        }
        head = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        return f"{head}: {self.message}" if head else self.message


@dataclass(frozen=True, slots=True)
class Gap:
    """Receipts of a tenant that are missing in the file, though a later one is there."""

    tenant_id: str
    first_seq: int
    last_seq: int

    @property
    def num_receipts(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(slots=True)
class TenantSummary:
    """Summary of one tenant's receipts in the file. amounts: by kind; a charge is positive."""

    first_seq: int
    last_seq: int
    num_receipts: int = 0
    num_missing: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    amounts: dict[str, int] = field(default_factory=dict)
    last_sha256: tuple[str, str] = (GENESIS, GENESIS)
    """sha256 of the last receipt: the stated one, and the one that was computed."""

    @property
    def total_nanousd(self) -> int:
        return sum(self.amounts.values())

    def add(self, receipt: Receipt, computed: str) -> None:
        self.last_seq = int_of(receipt, "receipt_seq")
        self.last_sha256 = (str(receipt["sha256"]), computed)
        self.num_receipts += 1
        for name in COUNTS:
            self.tokens[name] += int_of(receipt, name)
        kind, amount = str(receipt["kind"]), int_of(receipt, "amount_nanousd")
        self.amounts[kind] = self.amounts.get(kind, 0) + amount


class ReceiptCheck:
    """Checks receipts one after the other, in constant memory for each tenant.

    keys: public keys by key id.
    is_complete: each tenant's receipts must begin with its first and lack none; otherwise the file
    may be a part, and `gaps` lists the receipts that are missing in between.
    statement: a statement without its seal, which is compared with the receipts of its tenant and
    period.
    """

    def __init__(
        self,
        keys: Mapping[str, PublicKey],
        *,
        is_complete: bool = False,
        statement: Mapping[str, Any] | None = None,
    ) -> None:
        self._keys = keys
        self._is_complete = is_complete
        self._statement = statement
        self._figures = StatementFigures()
        self.findings: list[Finding] = []
        self.num_findings = 0
        self.gaps: list[Gap] = []
        self.num_receipts = 0
        self.tenants: dict[str, TenantSummary] = {}

    def add(self, row: int, receipt: Receipt) -> None:
        """Check the next receipt, which is in that row of the file."""
        self.num_receipts += 1
        if (computed := self._check(row, receipt)) is None:
            return
        self._note(row, receipt, self._chain_faults(receipt, computed))
        if (of := self._statement) and _is_on(of, receipt):
            self._figures.add(receipt)

    def add_reversal(self, row: int, receipt: Receipt, correction: Receipt) -> None:
        """Check a correction by itself, and that it reverses a receipt that was added."""
        if self._check(row, correction) is not None:
            self._note(row, correction, reversal_faults(receipt, correction))

    def finish(self) -> None:
        """Compare the receipts with the statement, if there is one. Call it after all receipts."""
        if self._statement is None:
            return
        for name, value in self._figures.document().items():
            stated = self._statement.get(name)
            if stated != value:
                message = f"the statement says {stated!r:.300}; the receipts make {value!r:.300}"
                self.note(name, message)

    def note(self, field: str | None, message: str) -> None:
        """Add a finding about the whole file."""
        self._keep(Finding(row=None, field=field, message=message))

    def _check(self, row: int, receipt: Receipt) -> str | None:
        """Check a receipt by itself. Returns its hash, None if a field has a wrong type."""
        if faults := list(type_faults(receipt)):
            self._note(row, receipt, faults)
            return None
        computed = sha256_of(receipt)
        self._note(row, receipt, receipt_faults(receipt, computed, self._keys))
        return computed

    def _note(self, row: int, receipt: Receipt, faults: "Iterator[Fault] | list[Fault]") -> None:
        for field_name, message in faults:
            named: JsonObject = {
                name: value
                for name in ("tenant_id", "receipt_seq", "entry_id", "request_id")
                if type(value := receipt.get(name)) is TYPES[name]
            }
            self._keep(Finding(row=row, field=field_name, message=message, **named))

    def _keep(self, finding: Finding) -> None:
        self.num_findings += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def _chain_faults(self, receipt: Receipt, computed: str) -> Iterator[Fault]:
        """Check that a receipt follows the tenant's last one, and make it the last."""
        tenant_id, seq = str(receipt["tenant_id"]), int_of(receipt, "receipt_seq")
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            # Earlier receipts count as present, unless the file is supposed to contain them.
            before = 0 if self._is_complete or seq < 1 else seq - 1
            tenant = self.tenants[tenant_id] = TenantSummary(seq, before)
        if seq <= tenant.last_seq:
            yield "receipt_seq", f"it comes after {tenant.last_seq}: twice, or out of order"
            return
        is_known = seq == 1 or tenant.num_receipts > 0
        if seq > tenant.last_seq + 1:
            yield from self._gap(tenant, Gap(tenant_id, tenant.last_seq + 1, seq - 1))
        # Either hash will do, so that a changed receipt is not found again at the next one.
        elif is_known and receipt["prev_sha256"] not in tenant.last_sha256:
            yield "prev_sha256", f"it is not the hash of receipt {seq - 1}"
        tenant.add(receipt, computed)

    def _gap(self, tenant: TenantSummary, gap: Gap) -> Iterator[Fault]:
        tenant.num_missing += gap.num_receipts
        if len(self.gaps) < MAX_FINDINGS:
            self.gaps.append(gap)
        if self._is_complete:
            yield "receipt_seq", f"receipts {gap.first_seq} to {gap.last_seq} are missing before it"


def statement_faults(
    statement: Mapping[str, Any], sha256: object, signature: object, keys: Mapping[str, PublicKey]
) -> Iterator[Fault]:
    """Yield the errors of a statement by itself, in its seal and its sums."""
    if sha256 != statement_figures.sha256_of(statement):
        yield "sha256", "it is not the hash of the statement: one of them was changed"
    yield from signature_faults(statement.get("signing_key"), sha256, signature, keys)
    try:
        kinds = statement["totals"]
        sums = [
            sum(kind[name] for kind in kinds.values()) for name in ("num_entries", "amount_nanousd")
        ]
        lines = sum(line["amount_nanousd"] for line in statement["lines"])
        charges = sum(kinds[kind]["amount_nanousd"] for kind in CHARGES if kind in kinds)
        closing = statement["opening_balance_nanousd"] + sums[1]
        stated = [statement[name] for name in ("num_entries", "total_nanousd")]
        stated_closing = statement["closing_balance_nanousd"]
    except (KeyError, TypeError, AttributeError) as error:
        yield None, f"it is no statement: {error!r}"
        return
    if stated != sums:
        yield "total_nanousd", f"it has {stated} entries and nano-dollars; its kinds have {sums}"
    if lines != charges:
        yield "lines", f"they add up to {lines}, the charges to {charges}"
    if stated_closing != closing:
        yield "closing_balance_nanousd", f"it is {stated_closing}; the sums make {closing}"


def _is_on(statement: Mapping[str, Any], receipt: Receipt) -> bool:
    return all(receipt[name] == statement.get(name) for name in ("tenant_id", "period"))
