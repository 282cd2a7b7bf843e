"""`chorale engines`: shows and corrects the pool of engines behind a gateway."""

from typing import Annotated, Any

import typer

from server.cli.api_command import api_command, table
from server.cli.terminal import say
from server.cli.units import moment
from server.text.json_object import JsonObject

app = typer.Typer(no_args_is_help=True, help="The engines that serve (operator).")

_COLUMNS = (
    "machine", "name", "state", "seen_s", "running", "waiting", "seats", "unsettled", "starts",
    "engine_id",
)  # fmt: skip
_SUSPECT = ("fingerprint", "tenant_id", "base_model", "state", "deaths", "expires_at")

Cleared = Annotated[
    str | None, typer.Option(help="Fingerprint of one to clear; the others are listed.")
]


def _row(engine: JsonObject) -> JsonObject:
    figures = engine["figures"] or {}
    return {
        **engine,
        "running": figures.get("running"),
        "waiting": figures.get("waiting"),
        "seats": engine["max_num_seqs"],
        "unsettled": figures.get("unsettled_records"),
    }


@api_command(
    app,
    "list",
    operator=True,
    show=table(_COLUMNS, _row, empty="The gateway knows of no engine yet."),
)
def list_engines(client: Any) -> Any:
    """List the engines of all machines, and what those of the gateway's machine do now.

    seen_s: seconds since the last sign of the engine's machine; after 300 the engine is silent.
    unsettled: records of the engine's journal that are not in the ledger yet.
    """
    return client.request("GET", "/admin/v1/engines")["data"]


def _show_lost(found: JsonObject) -> None:
    say(f"Voided {found['num_voided']} holds of {found['engine_id']}.")
    if found["num_open"]:
        say(f"{found['num_open']} more have not expired: say it again in some minutes.")


@api_command(app, "lost", operator=True, show=_show_lost)
def lose_engine(
    client: Any,
    engine_id: Annotated[
        str, typer.Argument(help="Id of the engine, as `chorale audit` names it.")
    ],
) -> Any:
    """Void the open holds of an engine whose journal is gone for good.

    Its requests that are not in the ledger yet become free of charge.
    """
    return client.request("POST", f"/admin/v1/engines/{engine_id}/lost")


@api_command(
    app,
    "suspects",
    operator=True,
    show=table(
        _SUSPECT,
        lambda suspect: {**suspect, "expires_at": moment(suspect["expires_at"])},
        empty="The gateway suspects no request.",
    ),
)
def list_suspects(client: Any, clear: Cleared = None) -> Any:
    """List or clear the requests that engines may have died of, as this gateway saw it."""
    method, place = ("DELETE", f"/{clear}") if clear else ("GET", "")
    return client.request(method, f"/admin/v1/engines/suspects{place}")["data"]
