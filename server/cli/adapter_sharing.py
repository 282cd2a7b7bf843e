"""`chorale adapters pin | unpin | grant | revoke`: keep an adapter resident, or share it."""

from typing import Annotated

import typer

from server.cli.connection import DEFAULT_URL, ApiKey, Name, Url, as_tenant
from server.cli.terminal import say
from server.cli.units import dollars, megabytes

Tenant = Annotated[str, typer.Argument(help="Name or id of the other tenant.")]


def pin(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Keep the version that `latest` means in the engines' memory, at a price by the hour."""
    from server.client.http import adapter_path

    with as_tenant(url, api_key) as client:
        made = client.request("PUT", adapter_path(name, "pin"))
    price, size = dollars(made["price_nanousd_per_hour"]), megabytes(made["size_bytes"])
    say(f"{name}@{made['version']} stays resident: {size} at {price} an hour.")


def unpin(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Let an adapter be evicted again when others need the memory."""
    from server.client.http import adapter_path

    with as_tenant(url, api_key) as client:
        client.request("DELETE", adapter_path(name, "pin"))
    say(f"{name} is not pinned any more.")


def grant(name: Name, tenant: Tenant, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Let another tenant use an adapter as OWNER/NAME, at the other tenant's cost."""
    from server.client.http import adapter_path

    with as_tenant(url, api_key) as client:
        made = client.request("PUT", adapter_path(name, "grants", tenant))
    say(f"{made['tenant']} may use {name}.")


def revoke(name: Name, tenant: Tenant, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Take a grant back: the other tenant's next request for the adapter is refused."""
    from server.client.http import adapter_path

    with as_tenant(url, api_key) as client:
        gone = client.request("DELETE", adapter_path(name, "grants", tenant))
    say(f"{gone['tenant']} may not use {name}.")
