"""`chorale audit`: compares what the ledger says in one place with what it says in another."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.beside import DatabaseUrl, ServerDir, open_beside
from server.cli.connection import DEFAULT_DATA_DIR, Json
from server.cli.terminal import CommandFailed, say, show, show_json, show_table, stderr

if TYPE_CHECKING:
    from server.billing.audit.report import Progress, Report


def audit(
    data_dir: ServerDir = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
    since: Annotated[
        str | None, typer.Option(help="ISO date; check row by row only what was posted since then.")
    ] = None,
    json: Json = False,
) -> None:
    """Check journal, ledger, receipts and statements against one another. Changes nothing.

    A gateway may run meanwhile. Exit code 1: something differs.
    """
    from sqlalchemy.exc import DBAPIError

    from server.billing.audit.report import report_body
    from server.billing.audit.run import audit as run_audit
    from server.database.database import DatabaseError
    from server.launch.local_pool import engine_folders

    engine_dirs = engine_folders(data_dir)
    since_ms = 0 if since is None else _at_ms(since)
    try:
        with open_beside(data_dir, database_url) as database, _telling() as tell:
            report = database.read_sync(
                lambda conn: run_audit(
                    conn,
                    engine_dirs=engine_dirs,
                    since_ms=since_ms,
                    progress=tell,
                )
            )
    except DatabaseError as error:
        raise CommandFailed(str(error)) from error
    except DBAPIError as error:
        # One cause is the database of another release, which has other tables.
        raise CommandFailed(str(error.orig).strip().partition("\n")[0]) from error
    if json:
        show_json(report_body(report))
    else:
        _show(report, has_engine=bool(engine_dirs))
    if report.num_findings:
        raise typer.Exit(1)


@contextmanager
def _telling() -> "Iterator[Progress]":
    """Show the audit's progress on a terminal."""
    with stderr().status("Auditing ...") as status:
        yield lambda check, num_rows: status.update(f"Auditing {check}: {num_rows:,} rows")


def _at_ms(text: str) -> int:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise CommandFailed(f"--since {text} is no ISO date.", exit_code=2) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _show(report: "Report", *, has_engine: bool) -> None:
    rows = [
        {"check": name, "rows": result.num_rows, "findings": result.num_findings}
        for name, result in report.checks.items()
    ]
    show_table(("check", "rows", "findings"), rows)
    for finding in report.findings:
        compared = f" (expected {finding.expected}, found {finding.found})"
        is_compared = (finding.expected, finding.found) != (None, None)
        show(f"{finding.check}: {finding.subject}: {finding.detail}{compared * is_compared}")
    if (num_unnamed := report.num_findings - len(report.findings)) > 0:
        show(f"... and {num_unnamed:,} more findings")
    for kind, count in report.incidents.items():
        show(f"on record: {count:,} incidents {kind}")
    show(f"difference {report.difference_nanousd:,} nano-dollars")
    for note in report.notes:
        say(note)
    if not has_engine:
        say("No engine's files are here: journals were checked by their numbers and totals.")
