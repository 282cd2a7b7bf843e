"""Whether receipts are true: checked by whoever has them, with the public keys and nothing else.

What is checked is what receipts say, so what says nothing of them may differ: of Parquet statistics
and offsets that a reader of rows does not need (a third of a small file), of CSV line ends, of JSON
spaces and how an escape is spelled. Any other byte that changes is found.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.billing import statement_figures
from server.billing.receipts.faults import (
    CHARGES,
    COUNTS,
    TYPES,
    Fault,
    int_of,
    receipt_faults,
    reversal_faults,
    signature_faults,
    type_faults,
)
from server.billing.receipts.receipt import GENESIS, Receipt, sha256_of
from server.billing.receipts.signing import PublicKey
from server.billing.statement_figures import StatementFigures
from server.text.json_object import JsonObject

MAX_FINDINGS = 1000
"""More are counted, not kept; the same of gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that cannot be. row: of the file, from 1; None where it is about all of them."""

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
    """Receipts that are not in the file, though some before and after them are."""

    tenant_id: str
    first_seq: int
    last_seq: int

    @property
    def num_receipts(self) -> int:
        return self.last_seq - self.first_seq + 1


@dataclass(slots=True)
class TenantSummary:
    """One tenant's receipts in the file. amounts: by kind, as the tenant sees them."""

    first_seq: int
    last_seq: int
    num_receipts: int = 0
    num_missing: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    amounts: dict[str, int] = field(default_factory=dict)
    last_sha256: tuple[str, str] = (GENESIS, GENESIS)
    """As the last receipt states it, and as it is."""

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

    keys: by key id.   is_complete: each tenant's receipts begin with its first and lack none;
    otherwise the file may be a period, and what lies between is told by `gaps`.   statement: one,
    without its seal, that those of its tenant and period come to.
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
        """The next receipt, of that row of the file."""
        self.num_receipts += 1
        if faults := list(type_faults(receipt)):
            self._note(row, receipt, faults)
            return
        computed = sha256_of(receipt)
        self._note(row, receipt, receipt_faults(receipt, computed, self._keys))
        self._note(row, receipt, self._chain_faults(receipt, computed))
        if (of := self._statement) and _is_on(of, receipt):
            self._figures.add(receipt)

    def add_reversal(self, row: int, receipt: Receipt, correction: Receipt) -> None:
        """A correction, by itself, of a receipt that was added."""
        if faults := list(type_faults(correction)):
            self._note(row, correction, faults)
            return
        computed = sha256_of(correction)
        self._note(row, correction, receipt_faults(correction, computed, self._keys))
        self._note(row, correction, reversal_faults(receipt, correction))

    def finish(self) -> None:
        """Compare with the statement, if there is one: nothing more is added."""
        if self._statement is None:
            return
        for name, value in self._figures.document().items():
            stated = self._statement.get(name)
            if stated != value:
                message = f"the statement says {stated!r:.300}; the receipts make {value!r:.300}"
                self.note(name, message)

    def note(self, field: str | None, message: str) -> None:
        """A finding about all of the file."""
        self._keep(Finding(row=None, field=field, message=message))

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
        """Whether it follows the one before it of its tenant, which it then is itself."""
        tenant_id, seq = str(receipt["tenant_id"]), int_of(receipt, "receipt_seq")
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            # As if all before it were there, but for the file that is said to have them.
            before = 0 if self._is_complete or seq < 1 else seq - 1
            tenant = self.tenants[tenant_id] = TenantSummary(seq, before)
        if seq <= tenant.last_seq:
            yield "receipt_seq", f"it comes after {tenant.last_seq}: twice, or out of order"
            return
        is_known = seq == 1 or tenant.num_receipts > 0
        if seq > tenant.last_seq + 1:
            yield from self._gap(tenant, Gap(tenant_id, tenant.last_seq + 1, seq - 1))
        # Either hash: a receipt that was changed is found once, not again in the next one.
        elif is_known and receipt["prev_sha256"] not in tenant.last_sha256:
            yield "prev_sha256", f"it does not follow receipt {seq - 1} as that is"
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
    """What is wrong with a statement by itself: its seal and its sums."""
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
        yield "total_nanousd", f"it has {stated} entries and nano-dollars, its kinds {sums}"
    if lines != charges:
        yield "lines", f"they come to {lines}, the charges to {charges}"
    if stated_closing != closing:
        yield "closing_balance_nanousd", f"it is {stated_closing}; the sums make {closing}"


def _is_on(statement: Mapping[str, Any], receipt: Receipt) -> bool:
    return all(receipt[name] == statement.get(name) for name in ("tenant_id", "period"))
