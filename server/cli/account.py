"""`chorale balance` and `chorale limits`: what a tenant has left, and what it may use."""

from collections.abc import Sequence

from server.cli.connection import DEFAULT_URL, ApiKey, Json, Url, as_tenant
from server.cli.terminal import show_json, show_table

BALANCE = ("tenant", "balance_usd", "held_usd", "available_usd")
_LIMIT = ("scope", "id", "metric", "limit", "used", "remaining", "reset_s")


def balance(url: Url = DEFAULT_URL, api_key: ApiKey = None, json: Json = False) -> None:
    """Show the tenant's balance, and how much of it open requests hold."""
    _show("/v1/balance", BALANCE, url, api_key, json)


def limits(url: Url = DEFAULT_URL, api_key: ApiKey = None, json: Json = False) -> None:
    """List the limits that the key's requests are under, with what is used of each."""
    _show("/v1/limits", _LIMIT, url, api_key, json)


def _show(path: str, columns: Sequence[str], url: str, api_key: str | None, as_json: bool) -> None:
    with as_tenant(url, api_key) as client:
        found = client.request("GET", path)
    if as_json:
        show_json(found)
    else:
        show_table(columns, found.get("data", [found]))
