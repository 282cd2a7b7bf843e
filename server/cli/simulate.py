"""`chorale simulate`: what a past time would have cost under other prices."""

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from server.cli.connection import (
    DEFAULT_DATA_DIR,
    DEFAULT_URL,
    AdminKey,
    DataDir,
    Json,
    Url,
    as_operator,
)
from server.cli.terminal import CommandFailed, show_json, show_table
from server.text.json_object import JsonObject

_PRICES = ("prompt", "cached", "completion", "storage", "pinned", "resident")
_COLUMNS = ("tenant", "kind", "num_entries", "actual_usd", "simulated_usd", "difference_usd")

_Token = Annotated[int | None, typer.Option(help="Nano-dollars a token.")]
_GbHour = Annotated[int | None, typer.Option(help="Nano-dollars for a GB and hour.")]


def simulate(
    start: Annotated[
        str | None, typer.Option(help="ISO date or Unix seconds; this month's first.")
    ] = None,
    end: Annotated[
        str | None, typer.Option(help="ISO date or Unix seconds, not included; now.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Id or name; everybody.")] = None,
    prompt_nanousd: _Token = None,
    cached_nanousd: _Token = None,
    completion_nanousd: _Token = None,
    storage_nanousd: _GbHour = None,
    pinned_nanousd: _GbHour = None,
    resident_nanousd: _GbHour = None,
    price_version: Annotated[int | None, typer.Option(help="All prices of this version.")] = None,
    book: Annotated[
        Path | None, typer.Option(help="JSON: default, plans, tenants, adapters; see the README.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """What a time would have cost; what no price is named for costs what it did."""
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
    with as_operator(url, admin_key, data_dir) as client:
        found = client.request("POST", "/admin/v1/billing/simulate", body=body)
    if json:
        show_json(found)
        return
    # Whoever is no tenant, as a proof is, has an id and no name.
    lines = [{**line, "tenant": line["tenant"] or line["tenant_id"]} for line in found["data"]]
    show_table(_COLUMNS, [*lines, {"tenant": "all", **found["total"]}])


def _read_book(path: Path) -> Any:
    try:
        return json_module.loads(path.read_text())
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CommandFailed(f"{path} is not JSON: {error}") from error
