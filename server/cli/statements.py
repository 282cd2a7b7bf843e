"""`chorale statements`: shows the statements of a tenant's months."""

from typing import Annotated

import typer

from server.cli.connection import DEFAULT_URL, ApiKey, Json, Url, as_tenant
from server.cli.terminal import say, show_facts, show_json, show_table

app = typer.Typer(no_args_is_help=True, help="Monthly statements of what was charged.")

_COLUMNS = ("period", "status", "num_entries", "spent_usd", "total_usd")
_LINE = ("kind", "model", "adapter_id", "meter", "price_version", "unit_nanousd", "quantity")


@app.command("list")
def list_statements(url: Url = DEFAULT_URL, api_key: ApiKey = None, json: Json = False) -> None:
    """List the statements of all months, the newest first."""
    with as_tenant(url, api_key) as client:
        found = client.request("GET", "/v1/statements")["data"]
    if json:
        show_json(found)
    elif found:
        show_table(_COLUMNS, found)
    else:
        say("There is nothing on any statement yet.")


@app.command("show")
def show_statement(
    period: Annotated[str, typer.Argument(help="Month of the statement, such as 2026-11.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show the statement of a month; --json prints what `chorale receipts verify` reads."""
    with as_tenant(url, api_key) as client:
        found = client.request("GET", f"/v1/statements/{period}")
    if json:
        show_json(found)
        return
    statement = found["statement"]
    names = [name for name, value in statement.items() if not isinstance(value, list | dict)]
    facts = [("status", found["status"]), *((name, statement[name]) for name in names)]
    show_facts(f"Statement {period}", facts)
    kinds = [{"kind": kind, **total} for kind, total in statement["totals"].items()]
    show_table(("kind", "num_entries", "amount_nanousd"), kinds)
    if lines := statement.get("lines"):
        show_table((*_LINE, "amount_nanousd"), lines)
