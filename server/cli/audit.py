"""`chorale audit`: compares what the ledger says in one place with what it says in another."""

from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.beside import DatabaseUrl, ServerDir, open_beside
from server.cli.connection import DEFAULT_DATA_DIR, Json
from server.cli.terminal import CommandFailed, say, show, show_json, show_table, stderr
from server.cli.units import time_option

if TYPE_CHECKING:
    from server.billing.audit.report import Report

app = typer.Typer(invoke_without_command=True)


@app.callback()
def audit(
    context: typer.Context,
    data_dir: ServerDir = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
    since: Annotated[
        int | None, time_option("Check row by row only what was posted since then.")
    ] = None,
    json: Json = False,
) -> None:
    """Check journal, ledger, receipts and statements against one another. Changes nothing.

    A gateway may run meanwhile. Exit code 1: something differs that is not acknowledged.
    """
    if context.invoked_subcommand:
        return
    from server.billing.audit.report import report_body
    from server.billing.audit.run import audit as run_audit
    from server.launch.engine_folders import engine_folders

    engine_dirs = engine_folders(data_dir)
    with (
        open_beside(data_dir, database_url) as database,
        stderr().status("Auditing ...") as status,
    ):

        def tell(check: str, num_rows: int) -> None:
            status.update(f"Auditing {check}: {num_rows:,} rows")

        since_ms = 1000 * (since or 0)
        report = database.read_sync(
            lambda conn: run_audit(conn, engine_dirs=engine_dirs, since_ms=since_ms, progress=tell)
        )
    if json:
        show_json(report_body(report))
    else:
        _show(report, has_engine=bool(engine_dirs))
    if report.num_findings:
        raise typer.Exit(1)


@app.command()
def acknowledge(
    finding_id: Annotated[str, typer.Argument(help="Id of a finding, as the audit shows it.")],
    reason: Annotated[str, typer.Option(help="What happened; it is kept in the audit log.")],
    data_dir: ServerDir = DEFAULT_DATA_DIR,
    database_url: DatabaseUrl = None,
) -> None:
    """Accept a finding of an audit made now, and book its difference by a signed entry."""
    from registry.errors import Fault
    from server.billing.audit.acknowledgements import acknowledge
    from server.billing.audit.run import audit as run_audit
    from server.billing.receipts.signing import Signer
    from server.database.clock import now_ms
    from server.launch.engine_folders import engine_folders
    from server.launch.secrets import SecretError, Secrets

    engines = engine_folders(data_dir)
    try:
        signer = Signer(bytes.fromhex(Secrets.load(data_dir, may_make=False).receipt_signing_key))
        with open_beside(data_dir, database_url) as database:
            report = database.read_sync(lambda conn: run_audit(conn, engine_dirs=engines))
            receipt = database.write_sync(
                lambda c: acknowledge(c, signer, report, finding_id, reason=reason, now_ms=now_ms())
            )
    except (Fault, SecretError) as error:
        raise CommandFailed(str(error)) from error
    show(f"entry {receipt['entry_id']} of {receipt['amount_usd']} dollars: {receipt['memo']}")


def _show(report: "Report", *, has_engine: bool) -> None:
    rows = [
        {"check": name, "rows": result.num_rows, "findings": result.num_findings}
        for name, result in report.checks.items()
    ]
    show_table(("check", "rows", "findings"), rows)
    for finding in report.findings:
        compared = f" (expected {finding.expected}, found {finding.found})"
        is_compared = (finding.expected, finding.found) != (None, None)
        show(f"{finding.finding_id} {finding}{compared * is_compared}")
    if (num_unnamed := report.num_findings - len(report.findings)) > 0:
        show(f"... and {num_unnamed:,} more findings")
    for finding in report.acknowledged:
        show(f"acknowledged: {finding.finding_id} {finding}")
    for kind, count in report.incidents.items():
        show(f"on record: {count:,} incidents {kind}")
    show(f"difference {report.difference_nanousd:,} nano-dollars")
    for note in report.notes:
        say(note)
    if not has_engine:
        say("No engine's files are here: journals were checked by their numbers and totals.")
