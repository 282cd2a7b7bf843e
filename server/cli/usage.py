"""`chorale usage`: shows what was used as sums, and exports it entry by entry."""

import sys
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from server.billing.rating import format_usd
from server.cli.api_command import api_command
from server.cli.options import End, Start
from server.cli.terminal import CommandFailed, say, show_json, show_table
from server.text.json_object import JsonObject

app = typer.Typer(no_args_is_help=True, help="What was used, and what it cost.")


Dimension = StrEnum("Dimension", ["tenant", "model", "key", "adapter_digest", "kind", "day"])
ExportFormat = Literal["csv", "jsonl", "parquet", "focus", "cloudevents"]
AllTenants = Annotated[
    bool, typer.Option("--all-tenants", help="Usage of all tenants, with the admin key.")
]

_SUMS = (
    "num_requests", "num_failed_requests", "prompt_tokens", "cached_tokens", "completion_tokens",
    "amount_usd",
)  # fmt: skip


@api_command(app, "show", operator=itemgetter("all_tenants"))
def show_usage(
    client: Any,
    json: bool,
    start: Start = None,
    end: End = None,
    group_by: Annotated[
        list[Dimension] | None, typer.Option(help="Dimension to sum by; repeatable.")
    ] = None,
    all_tenants: AllTenants = False,
) -> None:
    """Show requests, tokens and what was spent in a period; credits and payments stand apart."""
    groups = [dimension.value for dimension in group_by or []]
    params = {"start": start, "end": end, "group_by": groups}
    found = client.request("GET", f"{_prefix(all_tenants)}/usage", params=params)
    if json:
        show_json(found["data"])
        return
    if found["data"]:
        shown = groups or (["tenant"] if all_tenants else [])
        total = [_total(found["data"], shown[0])] if shown else []
        show_table((*shown, *_SUMS), [*found["data"], *total])
    else:
        say("Nothing was used in this time.")
    if found["bookings"]:
        rows = [{"not in the sums": booked["kind"], **booked} for booked in found["bookings"]]
        show_table(("not in the sums", "amount_usd"), rows)


@api_command(app, "export", operator=itemgetter("all_tenants"))
def export_usage(
    client: Any,
    start: Start = None,
    end: Annotated[
        str | None,
        typer.Option(help="ISO date or Unix seconds, itself not included; by default no end."),
    ] = None,
    period: Annotated[
        str | None,
        typer.Option(help="Month such as 2026-11, whose statement has exactly these entries."),
    ] = None,
    format: Annotated[
        ExportFormat,
        typer.Option(help="focus is FOCUS 1.2. All but parquet resume where a connection broke."),
    ] = "csv",
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write; by default the export goes to stdout. After a failure the whole "
            "rows lie beside it as .part, and the same command resumes from there; parquet leaves "
            "nothing and begins again."
        ),
    ] = None,
    all_tenants: AllTenants = False,
    tenant: Annotated[
        str | None, typer.Option(help="Id or name of the only tenant, with --all-tenants.")
    ] = None,
) -> None:
    """Export every ledger entry of a period, each a signed receipt that can be checked offline."""
    from server.client.exports import download_export
    from server.client.patience import Patience

    if tenant is not None and not all_tenants:
        raise CommandFailed("--tenant is the operator's: give --all-tenants with it.", 2)
    params = {"start": start, "end": end, "period": period, "tenant": tenant}
    path = f"{_prefix(all_tenants)}/usage/export"
    if output is None:
        for chunk in client.download(path, {**params, "format": format}):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        return
    try:
        download_export(
            client,
            path,
            params,
            format,
            output,
            patience=Patience(),
            on_resume=lambda entry_id: say(f"Going on behind entry {entry_id}."),
        )
    except OSError as error:  # of a file beside it
        raise OSError(error.errno, error.strerror, str(output)) from error
    say(f"Written to {output}.")


def _total(rows: list[JsonObject], first_column: str) -> JsonObject:
    """The sums over all rows, as the last row of the table."""
    counts = {name: sum(row[name] for row in rows) for name in _SUMS if name != "amount_usd"}
    amount_usd = format_usd(sum(row["amount_nanousd"] for row in rows))
    return {first_column: "total", **counts, "amount_usd": amount_usd}


def _prefix(all_tenants: bool) -> str:
    return "/admin/v1" if all_tenants else "/v1"
