"""`chorale statements`: shows the statements of a tenant's months."""

from typing import Annotated, Any

import typer

from server.billing.rating import format_usd
from server.cli.api_command import api_command, table
from server.cli.terminal import show_facts, show_table
from server.text.json_object import JsonObject

app = typer.Typer(no_args_is_help=True, help="Monthly statements of what was charged.")

_COLUMNS = ("period", "status", "num_entries", "spent_usd", "total_usd")
_LINE = ("kind", "model", "meter", "price_version", "quantity", "unit_usd", "amount_usd")
_PAYMENT = ("posted_at", "receipt_seq", "memo", "amount_usd")


@api_command(app, "list", show=table(_COLUMNS, empty="There is nothing on any statement yet."))
def list_statements(client: Any) -> Any:
    """List the statements of all months, the newest first."""
    return client.request("GET", "/v1/statements")["data"]


def _show(found: JsonObject) -> None:
    statement = _in_dollars(found["statement"])
    plain = {name: it for name, it in statement.items() if not isinstance(it, list | dict)}
    amounts = [{"amount": name, "usd": it} for name, it in plain.items() if name.endswith("_usd")]
    facts = [(name, it) for name, it in plain.items() if not name.endswith("_usd")]
    show_facts(f"Statement {statement['period']}", [("status", found["status"]), *facts])
    show_table(("amount", "usd"), amounts)
    kinds = [{"kind": kind, **_in_dollars(sums)} for kind, sums in statement["totals"].items()]
    show_table(("kind", "num_entries", "amount_usd"), kinds)
    names = statement.get("adapter_names", {})
    for line in statement.get("lines", ()):
        line["model"] = line["model"] or names.get(line["adapter_id"], line["adapter_id"])
    for name, columns in (("lines", _LINE), ("payments", _PAYMENT)):
        if rows := statement.get(name):
            show_table(columns, [_in_dollars(row) for row in rows])


@api_command(app, "show", show=_show)
def show_statement(
    client: Any,
    period: Annotated[str, typer.Argument(help="Month of the statement, such as 2026-11.")],
) -> Any:
    """Show a month's statement in dollars; --json prints what `chorale receipts verify` reads."""
    return client.request("GET", f"/v1/statements/{period}")


def _in_dollars(fields: JsonObject) -> JsonObject:
    """Fields with dollars, to nine decimals, in place of nano-dollars."""
    return {
        name.replace("_nanousd", "_usd"): format_usd(it) if name.endswith("_nanousd") else it
        for name, it in fields.items()
    }
