"""`chorale simulate`: computes what a past period would have cost under other prices."""

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.options import End, Start
from server.cli.terminal import CommandFailed, show_table
from server.text.json_object import JsonObject

_PRICES = ("prompt", "cached", "completion", "storage", "pinned", "resident")
_COLUMNS = ("tenant", "kind", "num_entries", "actual_usd", "simulated_usd", "difference_usd")

_Token = Annotated[int | None, typer.Option(help="Price in nano-dollars for a token.")]
_GbHour = Annotated[int | None, typer.Option(help="Price in nano-dollars for a GB and hour.")]


def simulate(
    client: Any,
    start: Start = None,
    end: End = None,
    tenant: Annotated[
        str | None, typer.Option(help="Id or name of a tenant; by default all tenants.")
    ] = None,
    prompt_nanousd: _Token = None,
    cached_nanousd: _Token = None,
    completion_nanousd: _Token = None,
    storage_nanousd: _GbHour = None,
    pinned_nanousd: _GbHour = None,
    resident_nanousd: _GbHour = None,
    price_version: Annotated[
        int | None, typer.Option(help="Version whose prices apply, all of them.")
    ] = None,
    book: Annotated[
        Path | None,
        typer.Option(help="JSON file of prices: default, and of plans, tenants, bases, adapters."),
    ] = None,
) -> Any:
    """Compute what a past period would have cost; kinds without a new price cost what they did."""
    given = dict(locals())
    names = [f"{name}_nanousd" for name in _PRICES]
    prices = {name: given[name] for name in names if given[name] is not None}
    if (bool(prices) + (price_version is not None) + (book is not None)) != 1:
        raise CommandFailed("Name prices, or --price-version, or --book: one of them.", 2)
    body: JsonObject = {"start": start, "end": end, "tenant": tenant}
    if price_version is not None:
        body["price_version"] = price_version
    else:
        body["book"] = _read_book(book) if book else {"default": prices}
    return client.request("POST", "/admin/v1/billing/simulate", body=body)


def show_simulation(found: Any) -> None:
    # Entries of no tenant, such as those of proofs, have an id and no name.
    lines = [{**line, "tenant": line["tenant"] or line["tenant_id"]} for line in found["data"]]
    show_table(_COLUMNS, [*lines, {"tenant": "all", **found["total"]}])


def _read_book(path: Path) -> Any:
    try:
        return json_module.loads(path.read_text())
    except ValueError as error:
        raise CommandFailed(f"{path} is not JSON: {error}") from error
