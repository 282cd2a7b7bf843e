"""The operator's commands that are one call each: prices, budgets, money, audit log."""

import uuid
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import typer

from server.cli.api_command import api_command, table
from server.cli.terminal import CommandFailed
from server.cli.units import dollars, moment, time_option
from server.text.json_object import JsonObject

prices = typer.Typer(no_args_is_help=True, help="Versions of prices, in dollars (operator).")
budgets = typer.Typer(no_args_is_help=True, help="Budgets of tenants, in dollars (operator).")
credits = typer.Typer(no_args_is_help=True, help="Credits that tenants get (operator).")
payments = typer.Typer(no_args_is_help=True, help="Payments of tenants (operator).")
corrections = typer.Typer(no_args_is_help=True, help="Entries that undo another (operator).")
audit_log = typer.Typer(no_args_is_help=True, help="What operators and keys did (operator).")

Given = Annotated[list[str], typer.Argument(metavar="NAME=VALUE...")]
Tenant = Annotated[str, typer.Argument(help="Id or name of the tenant.")]
Budget = Annotated[str, typer.Argument(help="monthly/hard, monthly/soft, prepaid/hard, ...")]
Dollars = Annotated[str, typer.Argument(help="Amount in dollars, such as 12.50.")]
EntryId = Annotated[int, typer.Argument(help="Number of the entry, as its receipt has it.")]
Beginning = Annotated[int | None, time_option("When it takes effect; by default now.")]
End = Annotated[int | None, time_option("When it ends; by default never.")]
Text = Annotated[str | None, typer.Option(help="Only lines with this, exactly.")]
Scope = Annotated[str, typer.Option(help="default, plan, tenant or adapter.")]
ScopeId = Annotated[str, typer.Option(help="Name of the plan, tenant, or id of the adapter.")]
Base = Annotated[str, typer.Option(help="Name of the only base model that it is for; else any.")]
Memo = Annotated[str | None, typer.Option(help="Note on the entry.")]
CallName = Annotated[str | None, typer.Option(help="Books nothing if a call has had it before.")]

# How many tokens, or GB-hours, a price in dollars is for.
_UNITS = dict.fromkeys(("prompt", "cached", "completion"), 10**6)
_UNITS |= dict.fromkeys(("storage", "pinned", "resident"), 1)
_PRICE = ("price_version", "scope", "scope_id", "base_model", "effective_at", "until", *_UNITS)
_BUDGET = ("kind", "enforcement", "status", "amount", "spent", "balance", "held", "remaining")
_ENTRY = ("entry_id", "kind", "tenant_name", "amount_usd", "memo")
_LINE = ("audit_id", "at", "actor", "action", "target", "detail", "tenant_id")


def _price_row(price: JsonObject) -> JsonObject:
    times = {name: price[name] and moment(price[name]) for name in ("effective_at", "until")}
    amounts = {name: dollars(price[f"{name}_nanousd"] * unit) for name, unit in _UNITS.items()}
    return {**price, **times, **amounts}


@api_command(prices, "list", operator=True, show=table(_PRICE, _price_row))
def list_prices(client: Any) -> Any:
    """List all versions: dollars for a million tokens of a kind, and for a GB-hour."""
    return client.request("GET", "/admin/v1/prices")["data"]


@api_command(prices, "add", operator=True, show=table(_PRICE, _price_row))
def add_price(
    client: Any, given: Given, scope: Scope = "default", scope_id: ScopeId = "",
    base: Base = "", effective_at: Beginning = None, until: End = None,
) -> Any:  # fmt: skip
    """Add a version: prompt, cached, completion in dollars for a million tokens; storage, pinned,
    resident for a GB-hour. A price that is left out stays as it is.
    """
    body: JsonObject = {"scope": scope, "scope_id": scope_id, "base_model": base}
    body |= {"effective_at": effective_at, "until": until}
    for name, _, value in (text.partition("=") for text in given):
        try:
            amount = Decimal(value) * 10**9 / _UNITS[name]
            if amount % 1:
                raise InvalidOperation
        except (KeyError, InvalidOperation):
            raise CommandFailed(
                f"{name}={value} is no price: give dollars, to the nano-dollar of a token or a "
                f"GB-hour, as prompt=0.25; there are {', '.join(_UNITS)}.",
                2,
            ) from None
        body[f"{name}_nanousd"] = int(amount)
    return client.request("POST", "/admin/v1/prices", body=body)


@api_command(budgets, "list", operator=True, show=table(_BUDGET))
def list_budgets(client: Any, tenant: Tenant) -> Any:
    """List a tenant's budgets, with what remains of each."""
    return client.request("GET", f"/admin/v1/tenants/{tenant}/budgets")["data"]


@api_command(budgets, "set", operator=True, show=table(_BUDGET))
def set_budget(client: Any, tenant: Tenant, budget: Budget, amount: Dollars) -> Any:
    """Set one of a tenant's budgets."""
    path = f"/admin/v1/tenants/{tenant}/budgets/{budget}"
    return client.request("PUT", path, body={"amount": amount})


@api_command(budgets, "rm", operator=True, show=table(("object", "deleted")))
def remove_budget(client: Any, tenant: Tenant, budget: Budget) -> Any:
    """Remove one of a tenant's budgets."""
    return client.request("DELETE", f"/admin/v1/tenants/{tenant}/budgets/{budget}")


@api_command(credits, "add", operator=True, show=table(_ENTRY))
@api_command(payments, "add", operator=True, show=table(_ENTRY))
def book(
    client: Any, ctx: typer.Context, tenant: Tenant, amount: Dollars, memo: Memo = None,
    idempotency_key: CallName = None,
) -> Any:  # fmt: skip
    """Book an amount in favour of a tenant."""
    assert ctx.parent
    path = f"/admin/v1/tenants/{tenant}/{ctx.parent.info_name}"
    body = {"amount_usd": amount, "memo": memo}
    return client.post_once(path, body, idempotency_key or uuid.uuid4().hex)


@api_command(corrections, "add", operator=True, show=table(_ENTRY))
def correct(
    client: Any, entry_id: EntryId, memo: Memo = None, idempotency_key: CallName = None
) -> Any:
    """Undo a charge, a credit or a payment by an entry of its own."""
    body = {"entry_id": entry_id, "memo": memo}
    return client.post_once("/admin/v1/corrections", body, idempotency_key or uuid.uuid4().hex)


@api_command(
    audit_log,
    "list",
    operator=True,
    show=table(_LINE, lambda line: {**line, "at": moment(line["at"])}),
)
def list_lines(client: Any, tenant: Text = None, actor: Text = None, action: Text = None) -> Any:
    """List the latest hundred actions, the newest first."""
    asked = {"tenant": tenant, "actor": actor, "action": action}
    return client.request("GET", "/admin/v1/audit-log", params=asked)["data"]
