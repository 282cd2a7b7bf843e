"""`chorale tenants`: manages tenants and their limits, for the operator."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from server.cli.account import BALANCE
from server.cli.api_command import api_command, table
from server.cli.operator import Given, Tenant
from server.cli.options import MaxConcurrency, RequestsPerMinute, TokensPerMinute
from server.cli.terminal import show_table
from server.text.json_object import JsonObject

Base = Annotated[str, typer.Argument(help="Name of the base model.")]

app = typer.Typer(no_args_is_help=True, help="Tenants and their limits (operator).")

_DETAILS = ("ignore_unknown_fields", "legal_name", "address")
_COLUMNS = ("tenant_id", "name", "status", "plan")
_BASE_LIMITS = ("base_model", "requests_per_minute", "tokens_per_minute", "max_concurrency")
_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrency",
    "max_queue_share",
    "weight",
    "max_adapters",
    "max_adapter_bytes_total",
    "monthly_budget",
)


def _show(tenant: JsonObject) -> None:
    rows = [{"field": name, "value": tenant.get(name)} for name in (*_COLUMNS, *_LIMITS, *_DETAILS)]
    show_table(("field", "value"), rows)


@api_command(app, "create", operator=True, show=_show)
def create(
    client: Any,
    name: Annotated[
        str, typer.Argument(help="Name of the tenant: small letters, digits and . _ -")
    ],
    plan: Annotated[
        str | None, typer.Option(help="Plan whose prices the tenant pays, by default standard.")
    ] = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrency: MaxConcurrency = None,
    max_queue_share: Annotated[
        float | None,
        typer.Option(help="Share of the engines' queues that the tenant may hold, above 0 to 1."),
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="Share of the engines when they are busy, against others.")
    ] = None,
    max_adapters: Annotated[
        int | None, typer.Option(help="Adapters that it may have; 100 by default.")
    ] = None,
    max_adapter_bytes_total: Annotated[
        int | None, typer.Option(help="Bytes of all its adapters; 20 GiB by default.")
    ] = None,
    monthly_budget: Annotated[
        str | None, typer.Option(help="Dollars a month, after which requests are refused.")
    ] = None,
) -> Any:
    """Make a tenant; it needs a key next (`chorale keys create`)."""
    given = dict(locals())
    body = {"name": name} | {
        key: given[key] for key in ("plan", *_LIMITS) if given[key] is not None
    }
    return client.request("POST", "/admin/v1/tenants", body=body)


@api_command(
    app,
    "list",
    operator=True,
    show=table(
        (*_COLUMNS, "requests_per_minute", "tokens_per_minute", "weight"),
        empty="There are no tenants yet: chorale tenants create NAME",
    ),
)
def list_tenants(client: Any) -> Any:
    """List all tenants."""
    return client.request("GET", "/admin/v1/tenants")["data"]


@api_command(app, "show", operator=True, show=_show)
def show_tenant(client: Any, tenant: Tenant) -> Any:
    """Show one tenant and its limits."""
    return client.request("GET", f"/admin/v1/tenants/{tenant}")


@api_command(app, "set", operator=True, show=table(("name", "plan", *_LIMITS, *_DETAILS)))
def set_limits(client: Any, tenant: Tenant, given: Given) -> Any:
    """Change a tenant's settings: requests_per_minute=60 legal_name="Acme Ltd.", or =none."""
    pairs = (text.partition("=")[::2] for text in given)
    body = {name: None if value == "none" else value for name, value in pairs}
    return client.request("PATCH", f"/admin/v1/tenants/{tenant}", body=body)


@api_command(app, "balance", operator=True, show=table(BALANCE))
def show_balance(client: Any, tenant: Tenant) -> Any:
    """Show a tenant's balance, and how much of it open requests hold."""
    return client.request("GET", f"/admin/v1/tenants/{tenant}/balance")


@api_command(app, "base-limits", operator=True, show=table(_BASE_LIMITS))
def list_base_limits(client: Any, tenant: Tenant) -> Any:
    """List the base models on which a tenant has limits."""
    return client.request("GET", f"/admin/v1/tenants/{tenant}/limits")["data"]


@api_command(app, "set-base-limits", operator=True, show=table(_BASE_LIMITS))
def set_base_limits(
    client: Any, tenant: Tenant, base: Base,
    requests_per_minute: RequestsPerMinute = None, tokens_per_minute: TokensPerMinute = None,
    max_concurrency: MaxConcurrency = None,
) -> Any:  # fmt: skip
    """Set a tenant's limits on a base model and its adapters; one that is left out is removed."""
    amounts = (requests_per_minute, tokens_per_minute, max_concurrency)
    body = dict(zip(_BASE_LIMITS[1:], amounts, strict=True))
    return client.request("PUT", f"/admin/v1/tenants/{tenant}/limits/{quote(base)}", body=body)


@api_command(app, "suspend", operator=True, show=table(_COLUMNS))
def suspend(client: Any, tenant: Tenant) -> Any:
    """Refuse all requests of a tenant, until `resume`."""
    return client.request("POST", f"/admin/v1/tenants/{tenant}/suspend")


@api_command(app, "resume", operator=True, show=table(_COLUMNS))
def resume(client: Any, tenant: Tenant) -> Any:
    """Serve a suspended tenant's requests again."""
    return client.request("POST", f"/admin/v1/tenants/{tenant}/resume")
