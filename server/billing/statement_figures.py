"""Figures of a tenant's month: sums over its receipts, computed without a database.

A statement is made of these figures, and whoever has the receipts can compute the same ones.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from server.billing.receipts.receipt import SPEND_KINDS, Receipt
from server.text.json_object import JsonObject

SCHEMA = "chorale.statement/1"
MAX_LINES = 5000
"""Lines of a statement; further ones are merged by meter and price, without model or adapter."""
MAX_PAYMENTS = 1000
"""Payments that a statement lists; further payments are in its totals only."""

_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_MB_S = 10**6 * 1000
"""Bytes times milliseconds in a megabyte-second (10^6 bytes for a second)."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


class LineKey(NamedTuple):
    """The key of a line. unit_nanousd: price of a token, or for `kept_mb_s` of a GB for an hour."""

    kind: str
    model: str | None
    adapter_id: str | None
    meter: str
    price_version: int | None
    unit_nanousd: int


@dataclass(slots=True)
class _Sum:
    quantity: int = 0
    amount_nanousd: int = 0

    def add(self, quantity: int, amount_nanousd: int) -> None:
        self.quantity += quantity
        self.amount_nanousd += amount_nanousd


@dataclass(slots=True)
class StatementFigures:
    """Sums over receipts, which are added in the order of their seqs.

    Charged tokens are on a line with their price, tokens that are rated 0 on a line with price 0:
    so quantity times unit is the amount of every line of tokens.
    """

    num_entries: int = 0
    first_receipt_seq: int | None = None
    last_receipt_seq: int | None = None
    tenant_name: str | None = None
    total_nanousd: int = 0
    _tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TOKENS, 0))
    _totals: dict[str, _Sum] = field(default_factory=dict)
    _lines: dict[LineKey, _Sum] = field(default_factory=dict)
    _payments: list[JsonObject] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)

    def copy(self) -> "StatementFigures":
        """Return a copy; adding receipts to it leaves the original as it is."""
        return StatementFigures(
            self.num_entries,
            self.first_receipt_seq,
            self.last_receipt_seq,
            self.tenant_name,
            self.total_nanousd,
            dict(self._tokens),
            {kind: _Sum(**_values(total)) for kind, total in self._totals.items()},
            {key: _Sum(**_values(line)) for key, line in self._lines.items()},
            list(self._payments),
            self._hash.copy(),
        )

    def add(self, receipt: Receipt) -> None:
        """Add the tenant's next receipt that is on this statement."""
        kind, amount = str(receipt["kind"]), _int(receipt, "amount_nanousd")
        self.num_entries += 1
        self.last_receipt_seq = _int(receipt, "receipt_seq")
        if self.first_receipt_seq is None:
            self.first_receipt_seq = self.last_receipt_seq
        self.tenant_name = None if receipt["tenant_name"] is None else str(receipt["tenant_name"])
        self.total_nanousd += amount
        for name in _TOKENS:
            self._tokens[name] += _int(receipt, name)
        self._totals.setdefault(kind, _Sum()).add(1, amount)
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
            "spent_nanousd": spent_of(
                {kind: total.amount_nanousd for kind, total in self._totals.items()}
            ),
            **self._tokens,
            "totals": {
                kind: {"num_entries": total.quantity, "amount_nanousd": total.amount_nanousd}
                for kind, total in sorted(self._totals.items())
            },
            "lines": [
                {**key._asdict(), **_values(line)}
                for key, line in sorted(self._lines.items(), key=lambda item: _order(item[0]))
            ],
            "payments": self._payments,
        }

    def _add_tokens(self, receipt: Receipt, amount: int) -> None:
        # A request that is rated 0 has prices in its receipt, too; its tokens get price 0 here.
        is_charged = amount > 0
        counts = dict(zip(_TOKENS, (_int(receipt, name) for name in _TOKENS), strict=True))
        counts["prompt_tokens"] -= counts["cached_tokens"]
        for meter, count in counts.items():
            unit = _int(receipt, meter.replace("_tokens", "_nanousd")) if is_charged else 0
            if count:
                self._add_line(receipt, meter, unit, count, count * unit)

    def _add_kept(self, receipt: Receipt, amount: int) -> None:
        quantity = _int(receipt, "size_bytes") * _int(receipt, "duration_ms") // _MB_S
        self._add_line(receipt, "kept_mb_s", _int(receipt, "kept_nanousd"), quantity, amount)

    def _add_line(
        self, receipt: Receipt, meter: str, unit: int, quantity: int, amount: int
    ) -> None:
        named = {name: receipt[name] for name in ("kind", "model", "adapter_id", "price_version")}
        key = LineKey(meter=meter, unit_nanousd=unit, **named)  # type: ignore[arg-type]
        if key not in self._lines and len(self._lines) >= MAX_LINES:
            key = key._replace(model=None, adapter_id=None)
        self._lines.setdefault(key, _Sum()).add(quantity, amount)


def spent_of(amounts: Mapping[str, int]) -> int:
    """Return the spend among amounts by kind of entry."""
    return sum(amounts.get(kind, 0) for kind in SPEND_KINDS)


def canonical(statement: Mapping[str, Any]) -> bytes:
    """Return the bytes that are hashed: JSON sorted by name, without spaces, in UTF-8."""
    return _encode(statement).encode()


def sha256_of(statement: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(statement)).hexdigest()


def _values(line: _Sum) -> dict[str, int]:
    return {"quantity": line.quantity, "amount_nanousd": line.amount_nanousd}


def _order(key: LineKey) -> tuple[Any, ...]:
    return tuple((value is not None, value) for value in key)


def _int(receipt: Receipt, name: str) -> int:
    """Return an integer field, 0 if it is None."""
    value = receipt[name]
    assert value is None or isinstance(value, int)
    return value or 0
