"""`chorale engines`: shows and corrects the pool of engines behind a gateway."""

from typing import Annotated

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
from server.cli.terminal import say, show_json, show_table
from server.text.json_object import JsonObject

app = typer.Typer(no_args_is_help=True, help="The engines that serve (operator).")

_COLUMNS = (
    "machine", "name", "state", "seen_s", "running", "waiting", "seats", "unsettled", "starts",
    "engine_id",
)  # fmt: skip


@app.command("list")
def list_engines(
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """List the engines of all machines, and what those of the gateway's machine do now.

    seen_s: seconds since the last sign of the engine's machine; after 300 the engine is silent.
    unsettled: records of the engine's journal that are not in the ledger yet.
    """
    with as_operator(url, admin_key, data_dir) as client:
        found = client.request("GET", "/admin/v1/engines")["data"]
    if json:
        show_json(found)
    elif found:
        show_table(_COLUMNS, [_row(engine) for engine in found])
    else:
        say("The gateway knows of no engine yet.")


@app.command("lost")
def lose_engine(
    engine_id: Annotated[
        str, typer.Argument(help="Id of the engine, as `chorale audit` names it.")
    ],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """Void the open holds of an engine whose journal is gone for good.

    Its requests that are not in the ledger yet become free of charge.
    """
    with as_operator(url, admin_key, data_dir) as client:
        found = client.request("POST", f"/admin/v1/engines/{engine_id}/lost")
    if json:
        show_json(found)
        return
    say(f"Voided {found['num_voided']} holds of {engine_id}.")
    if found["num_open"]:
        say(f"{found['num_open']} more have not expired: say it again in some minutes.")


@app.command("suspects")
def list_suspects(
    clear: Annotated[
        str | None, typer.Option(help="Fingerprint of one to clear; the others are listed.")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """List or clear the requests that engines may have died of, as this gateway saw it."""
    with as_operator(url, admin_key, data_dir) as client:
        method, place = ("DELETE", f"/{clear}") if clear else ("GET", "")
        found = client.request(method, f"/admin/v1/engines/suspects{place}")["data"]
    if json:
        show_json(found)
    elif found:
        show_table(list(found[0])[1:], found)
    else:
        say("The gateway suspects no request.")


def _row(engine: JsonObject) -> JsonObject:
    figures = engine["figures"] or {}
    return {
        **engine,
        "running": figures.get("running"),
        "waiting": figures.get("waiting"),
        "seats": engine["max_num_seqs"],
        "unsettled": figures.get("unsettled_records"),
    }
