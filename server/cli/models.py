"""`chorale models`: lists, adds, drains, replaces and removes the base models of a server."""

import json as json_text
import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from server.cli.api_command import api_command, table
from server.cli.terminal import CommandFailed, say
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.client.http import Client

app = typer.Typer(no_args_is_help=True, help="The base models that a server has (operator).")

_PATH = "/admin/v1/models"
_COLUMNS = ("name", "state", "origin", "engines", "requests_here", "base_revision", "problem")
_LOOK_S = 0.5

Name = Annotated[str, typer.Argument(help="Name of the base model, as clients ask for it.")]


def _row(model: JsonObject) -> JsonObject:
    return {**model, "base_revision": (model["base_revision"] or "")[:12]}


@api_command(app, "list", operator=True, show=table(_COLUMNS, _row))
def list_models(client: Any) -> Any:
    """List the base models, with what each is doing."""
    return client.request("GET", _PATH)["data"]


@api_command(app, "add", operator=True)
def add(
    client: Any,
    model: Annotated[str, typer.Argument(help="Folder of the model on the server, or a hub id.")],
    name: Annotated[
        str | None, typer.Option(help="Its name for clients; by default that of its folder.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting of the model, as quantization=int8."
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until it takes requests.")] = True,
) -> None:
    """Add a base model to a running server, or replace one that was added with this name.

    Of a replaced one no request is lost: those under way end on the old engines.
    """
    name = name or model.rstrip("/").rpartition("/")[2]
    body = {"name": name, "model": model, "settings": dict(map(_setting, settings or ()))}
    before = _homes(client, name)
    is_changed = client.request("POST", _PATH, body=body)["is_changed"]
    if not is_changed:
        say(f"{name} is there already, with exactly these settings.")
    elif wait:
        _wait_for(client, name, before)


@api_command(app, "drain", operator=True)
def drain(client: Any, name: Name) -> None:
    """Have a base model take no new requests; its engines end with the last one under way."""
    client.request("POST", f"{_PATH}/{quote(name)}/drain")
    say(f"{name} takes no requests now; `chorale models resume {name}` has it serve again.")


@api_command(app, "resume", operator=True)
def resume(client: Any, name: Name) -> None:
    """Have a drained base model serve again."""
    client.request("POST", f"{_PATH}/{quote(name)}/resume")
    say(f"{name} is being started.")


@api_command(app, "rm", operator=True)
def rm(client: Any, name: Name) -> None:
    """Remove a base model that was added; its last requests end, and are billed."""
    client.request("DELETE", f"{_PATH}/{quote(name)}")
    say(f"{name} is removed; its engines go when its last request has ended.")


def _setting(text: str) -> tuple[str, object]:
    """A setting and its value, which may be JSON. Raises CommandFailed."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CommandFailed(f"--set {text}: write NAME=VALUE, as quantization=int8.", exit_code=2)
    try:
        return name, json_text.loads(value)
    except ValueError:
        return name, value


def _wait_for(client: "Client", name: str, former: set[str]) -> None:
    """Say what becomes of a base model, until it serves. Raises CommandFailed if it does not."""
    shown = None
    while True:
        found = [model for model in client.request("GET", _PATH)["data"] if model["name"] == name]
        new = next((it for it in found if it["home"] not in former), None)
        state = new["state"] if new else "preparing"
        if state != shown:
            say(f"{name}: {state}")
            shown = state
        if new and state == "failed":
            raise CommandFailed(f"{name} cannot be served: {new['problem']}")
        if state in ("serving", "asleep"):
            return
        time.sleep(_LOOK_S)


def _homes(client: "Client", name: str) -> set[str]:
    found = client.request("GET", _PATH)["data"]
    return {model["home"] for model in found if model["name"] == name}
