"""`chorale balance` and `chorale limits`: what a tenant has left, and what it may use."""

from typing import Any

from server.cli.terminal import show_table

BALANCE = ("tenant", "balance_usd", "held_usd", "available_usd")
_LIMIT = ("scope", "id", "metric", "limit", "used", "remaining", "reset_s")


def balance(client: Any) -> Any:
    """Show the tenant's balance, and how much of it open requests hold."""
    return client.request("GET", "/v1/balance")


def limits(client: Any) -> Any:
    """List the limits that the key's requests are under, with what is used of each."""
    return client.request("GET", "/v1/limits")


def show_limits(found: Any) -> None:
    show_table(_LIMIT, found["data"])
