"""Compares issued statements with the entries of their periods, to which none was added since."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from server.billing.audit.report import UNREADABLE, Finding, Scope, differences
from server.billing.audit.sums import integer_sum
from server.billing.receipts.check import statement_faults
from server.billing.receipts.rows import SIGNED_AMOUNT, iterate_receipts, select_receipts
from server.billing.receipts.signing_keys import list_keys
from server.billing.statement_figures import StatementFigures
from server.billing.statements import Statement
from server.billing.tables import entries, statements
from server.database.pages import pages
from server.text.times import rfc3339


def check_statements(scope: Scope) -> Iterator[Finding]:
    """Check each statement's count and total, and that none of its entries was posted after it."""
    entry = entries.c
    for row in _statements(scope):
        query = sa.select(
            sa.func.count(),
            sa.func.coalesce(integer_sum(SIGNED_AMOUNT), 0),
            sa.func.max(entry.posted_at_ms),
        ).where(entry.tenant_id == row.tenant_id, entry.period == row.period)
        count, total, posted_at_ms = scope.conn.execute(query).one()
        pairs = {
            "num_entries": (count, row.num_entries),
            "total_nanousd": (total, row.total_nanousd),
            "has entries posted after it": (False, (posted_at_ms or 0) > row.issued_at_ms),
        }
        yield from differences("statements", _name(row), pairs)
        scope.count("statements", 1)


def check_documents(scope: Scope) -> Iterator[Finding]:
    """Check that each document is sealed and equals the sums over its receipts, line by line."""
    keys = {known.public.key_id: known.public for known in list_keys(scope.conn)}
    opening: tuple[str, int] = ("", 0)
    for row in _statements(scope):
        if opening[0] != row.tenant_id:
            opening = (row.tenant_id, 0)
        subject = _name(row)
        if hashlib.sha256(row.document.encode()).hexdigest() != row.sha256:
            yield Finding("statements", subject, "sha256 is not of its document")
            continue
        document = json.loads(row.document)
        for name, fault in statement_faults(document, row.sha256, row.signature, keys):
            yield Finding("statements", subject, f"{name}: {fault}")
        try:
            expected = _document(scope, row) | {"opening_balance_nanousd": opening[1]}
        except UNREADABLE as error:
            expected = {"receipts_sha256": f"cannot be made: {error}"}
        pairs = {name: (value, document.get(name)) for name, value in expected.items()}
        yield from differences("statements", subject, pairs)
        opening = (row.tenant_id, opening[1] + row.total_nanousd)


def _document(scope: Scope, row: Statement) -> dict[str, Any]:
    """Return the document's fields as its receipts determine them now. Raises UNREADABLE."""
    figures, of = StatementFigures(), entries.c
    query = select_receipts().where(of.tenant_id == row.tenant_id, of.period == row.period)
    for receipt in iterate_receipts(scope.conn, query):
        figures.add(receipt)
    return {
        "tenant_id": row.tenant_id,
        "period": row.period,
        "issued_at": rfc3339(row.issued_at_ms),
        "signing_key": row.signing_key,
        **figures.document(),
    }


def _statements(scope: Scope) -> Iterator[Statement]:
    """Yield all statements by tenant, oldest first."""
    key = statements.c.tenant_id, statements.c.period
    for page in pages(scope.conn, sa.select(statements), *key):
        yield from (Statement(**row) for row in page)


def _name(row: Statement) -> str:
    return f"statement {row.tenant_id}/{row.period}"
