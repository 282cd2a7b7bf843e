"""Figures of a tenant's month: sums over its receipts, computed without a database.

A statement is made of these figures, and whoever has the receipts can compute the same ones.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from server.billing.rating import GB_HOUR
from server.billing.receipts.receipt import SPEND_KINDS, Receipt, int_of
from server.text.json_object import JsonObject

SCHEMA = "chorale.statement/1"
MAX_LINES = 5000
"""Lines of a statement; further ones are merged by meter and price, without model or adapter."""
MAX_PAYMENTS = 1000
"""Payments that a statement lists; further payments are in its totals only."""

_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


class LineKey(NamedTuple):
    """The key of a line.

    meter: "gb_hours" counts GB (10^9 bytes) for an hour.   unit_nanousd: the price of one.
    """

    kind: str
    model: str | None
    adapter_id: str | None
    meter: str
    price_version: int | None
    unit_nanousd: int


_Sums = dict[Any, tuple[int, int]]
"""(quantity, amount) by key: quantity of entries or tokens, or of bytes times milliseconds."""


@dataclass(slots=True)
class StatementFigures:
    """Sums over receipts, which are added in the order of their seqs.

    Charged tokens are on a line with their price, tokens that are rated 0 on a line with price 0.
    Quantity times unit is the amount of every line, rounded to the nano-dollar. The entries of
    GB-hours were rounded one by one, so a line of the meter "rounding" has the rest of each kind.
    """

    num_entries: int = 0
    first_receipt_seq: int | None = None
    last_receipt_seq: int | None = None
    tenant_name: str | None = None
    total_nanousd: int = 0
    _tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TOKENS, 0))
    _totals: _Sums = field(default_factory=dict)
    _lines: _Sums = field(default_factory=dict)
    _payments: list[JsonObject] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)

    def copy(self) -> "StatementFigures":
        """Return a copy; adding receipts to it leaves the original as it is."""
        names = ("_tokens", "_totals", "_lines", "_payments", "_hash")
        return replace(self, **{name: getattr(self, name).copy() for name in names})

    def add(self, receipt: Receipt) -> None:
        """Add the tenant's next receipt that is on this statement."""
        kind, amount = str(receipt["kind"]), int_of(receipt, "amount_nanousd")
        self.num_entries += 1
        self.last_receipt_seq = int_of(receipt, "receipt_seq")
        if self.first_receipt_seq is None:
            self.first_receipt_seq = self.last_receipt_seq
        self.tenant_name = None if receipt["tenant_name"] is None else str(receipt["tenant_name"])
        self.total_nanousd += amount
        for name in _TOKENS:
            self._tokens[name] += int_of(receipt, name)
        _add(self._totals, kind, 1, amount)
        if kind == "usage":
            self._add_tokens(receipt, amount)
        elif receipt["kept_nanousd"] is not None:
            self._add_kept(receipt, amount)
        elif kind == "payment" and len(self._payments) < MAX_PAYMENTS:
            names = ("entry_id", "receipt_seq", "posted_at", "memo", "amount_nanousd")
            self._payments.append({name: receipt[name] for name in names})
        self._hash.update(f"{receipt['sha256']}\n".encode())

    def document(self) -> JsonObject:
        """Return the figures as plain JSON.

        receipts_sha256: hash of the receipts' sha256, each in hex on a line.
        """
        return {
            "tenant_name": self.tenant_name,
            "num_entries": self.num_entries,
            "first_receipt_seq": self.first_receipt_seq,
            "last_receipt_seq": self.last_receipt_seq,
            "receipts_sha256": self._hash.hexdigest(),
            "total_nanousd": self.total_nanousd,
            "spent_nanousd": sum(self._totals.get(kind, (0, 0))[1] for kind in SPEND_KINDS),
            **self._tokens,
            "totals": {
                kind: {"num_entries": number, "amount_nanousd": amount}
                for kind, (number, amount) in sorted(self._totals.items())
            },
            "lines": list(self._document_lines()),
            "payments": self._payments,
        }

    def _document_lines(self) -> Iterator[JsonObject]:
        rest: dict[str, int] = defaultdict(int)
        for key in sorted(self._lines, key=_order):
            count, charged = self._lines[key]
            quantity, amount = str(count), charged
            if key.meter == "gb_hours":
                billionths = (count * 10**9 + GB_HOUR // 2) // GB_HOUR
                quantity = f"{billionths // 10**9}.{billionths % 10**9:09}"
                amount = (billionths * key.unit_nanousd + 10**9 // 2) // 10**9
                rest[key.kind] += charged - amount
            yield {**key._asdict(), "quantity": quantity, "amount_nanousd": amount}
        for kind, amount in rest.items():
            if amount:
                key = LineKey(kind, None, None, "rounding", None, 1)
                yield {**key._asdict(), "quantity": str(amount), "amount_nanousd": amount}

    def _add_tokens(self, receipt: Receipt, amount: int) -> None:
        # A request that is rated 0 has prices in its receipt, too; its tokens get price 0 here.
        is_charged = amount > 0
        counts = dict(zip(_TOKENS, (int_of(receipt, name) for name in _TOKENS), strict=True))
        counts["prompt_tokens"] -= counts["cached_tokens"]
        for meter, count in counts.items():
            unit = int_of(receipt, meter.replace("_tokens", "_nanousd")) if is_charged else 0
            if count:
                self._add_line(receipt, meter, unit, count, count * unit)

    def _add_kept(self, receipt: Receipt, amount: int) -> None:
        quantity = int_of(receipt, "size_bytes") * int_of(receipt, "duration_ms")
        self._add_line(receipt, "gb_hours", int_of(receipt, "kept_nanousd"), quantity, amount)

    def _add_line(
        self, receipt: Receipt, meter: str, unit: int, quantity: int, amount: int
    ) -> None:
        named = {name: receipt[name] for name in ("kind", "model", "adapter_id", "price_version")}
        key = LineKey(meter=meter, unit_nanousd=unit, **named)  # type: ignore[arg-type]
        if key not in self._lines and len(self._lines) >= MAX_LINES:
            key = key._replace(model=None, adapter_id=None)
        _add(self._lines, key, quantity, amount)


def canonical(statement: Mapping[str, Any]) -> bytes:
    """Return the bytes that are hashed: JSON sorted by name, without spaces, in UTF-8."""
    return _encode(statement).encode()


def sha256_of(statement: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(statement)).hexdigest()


def _add(sums: _Sums, key: object, quantity: int, amount_nanousd: int) -> None:
    before = sums.get(key, (0, 0))
    sums[key] = before[0] + quantity, before[1] + amount_nanousd


def _order(key: LineKey) -> tuple[Any, ...]:
    return tuple((value is not None, value) for value in key)
