"""`chorale adapters pin | unpin | grant | revoke | offers | accept | decline`.

The commands keep an adapter resident, share it, and answer what other tenants offer.
"""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from server.cli.connection import Name
from server.cli.terminal import say, show_json, show_table
from server.cli.units import dollars, megabytes, moment
from server.client.paths import adapter_path
from server.text.json_object import JsonObject

Tenant = Annotated[str, typer.Argument(help="Name or id of the other tenant.")]
Offered = Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The offered adapter.")]


def pin(client: Any, name: Name) -> None:
    """Keep the version that `latest` means in the engines' memory, at a price by the hour."""
    made = client.request("PUT", adapter_path(name, "pin"))
    say(f"{name}@{made['version']} stays resident: {size_and_price(made)}.")


def unpin(client: Any, name: Name) -> None:
    """Let an adapter be evicted again when others need the memory."""
    client.request("DELETE", adapter_path(name, "pin"))
    say(f"{name} is not pinned any more.")


def grant(client: Any, name: Name, tenant: Tenant) -> None:
    """Offer an adapter to another tenant, which may accept and use it at its own cost."""
    made = client.request("PUT", adapter_path(name, "grants", tenant))
    if made["status"] == "accepted":
        say(f"{made['tenant']} may use {name}.")
    else:
        say(f"{name} is offered to {tenant}, if there is such a tenant; it has 30 days to accept.")


def revoke(client: Any, name: Name, tenant: Tenant) -> None:
    """Take an offer or a grant back: the other tenant's next request is refused."""
    gone = client.request("DELETE", adapter_path(name, "grants", tenant))
    say(f"{gone['tenant']} may not use {name}.")


def list_offers(client: Any, json: bool) -> None:
    """List the adapters that other tenants offer to you, and those that you accepted."""
    answer = client.request("GET", "/v1/offers")
    if json:
        show_json(answer["data"])
    elif answer["data"]:
        columns = ("model", "status", "until", "rank", "size", "1M in", "1M out")
        show_table(columns, [_offer_row(offer) for offer in answer["data"]])
    else:
        say("Nothing is offered to you.")
    if answer["has_more"]:
        say("More offers appear when these are answered.")


def accept(client: Any, model: Offered) -> None:
    """Accept an offer, so that your requests may name the adapter, at your cost."""
    client.request("PUT", f"/v1/offers/{quote(model)}")
    say(f"Requests may name {model}.")


def decline(client: Any, model: Offered) -> None:
    """Decline an offer, which its owner is not told, or give an accepted adapter back."""
    client.request("DELETE", f"/v1/offers/{quote(model)}")
    say(f"{model} is declined.")


def size_and_price(pin: JsonObject) -> str:
    return f"{megabytes(pin['size_bytes'])} at {dollars(pin['price_nanousd_per_hour'])} an hour"


def _offer_row(offer: JsonObject) -> JsonObject:
    size_bytes, expires_at = offer["size_bytes"], offer["expires_at"]
    return {
        **offer,
        "until": expires_at and moment(expires_at)[:10],
        "size": size_bytes and megabytes(size_bytes),
        "1M in": dollars(offer["prompt_nanousd"] * 1_000_000),
        "1M out": dollars(offer["completion_nanousd"] * 1_000_000),
    }
