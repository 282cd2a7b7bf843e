"""`chorale routes`: names for several models, of a tenant or, with --admin, of the operator."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.connection import (
    DEFAULT_DATA_DIR,
    DEFAULT_URL,
    AdminKey,
    ApiKey,
    DataDir,
    Json,
    Url,
    as_operator,
    as_tenant,
)
from server.cli.terminal import CommandFailed, say, show_json, show_table
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.client.http import Client

app = typer.Typer(no_args_is_help=True, help="Routes: names for several models.")

Name = Annotated[str, typer.Argument(help="Name of the route.")]
Admin = Annotated[
    bool, typer.Option("--admin", help="The operator's routes, which every tenant may name.")
]

_OPTIONS = ("first_token_timeout_s", "weight", "min_mean_logprob")


@app.command("list")
def list_routes(
    admin: Admin = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """List routes with the models of each."""
    with _connect(admin, url, api_key, admin_key, data_dir) as client:
        found = client.request("GET", f"{_prefix(admin)}/routes")["data"]
    if json:
        show_json(found)
    elif found:
        rows = [{**route, "models": [each["model"] for each in route["models"]]} for route in found]
        show_table(("id", "strategy", "models"), rows)
    else:
        say("There are no routes yet: chorale routes set NAME --fallback MODEL,MODEL")


@app.command("show")
def show_route(
    name: Name,
    admin: Admin = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """Show the models of a route, in order."""
    with _connect(admin, url, api_key, admin_key, data_dir) as client:
        _show(client.request("GET", f"{_prefix(admin)}/routes/{name}"), json)


@app.command("set")
def set_route(
    name: Name,
    fallback: Annotated[
        str | None,
        typer.Option(help="Models in order, MODEL[:SECONDS]: the time for its first token."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Models with their shares, MODEL=WEIGHT,MODEL=WEIGHT.")
    ] = None,
    cascade: Annotated[
        str | None,
        typer.Option(help="Models in order, MODEL:LOGPROB: the least mean that is taken."),
    ] = None,
    admin: Admin = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """Make or change a route: small,large or a=90,b=10 or small:-0.2,large."""
    given = {"fallback": fallback, "weights": weights, "cascade": cascade}
    chosen = {strategy: text for strategy, text in given.items() if text is not None}
    if len(chosen) != 1:
        raise CommandFailed("Give one of --fallback, --weights and --cascade.", exit_code=2)
    ((strategy, text),) = chosen.items()
    models = [_model(strategy, each) for each in text.split(",")]
    body = {"strategy": strategy, "models": models}
    with _connect(admin, url, api_key, admin_key, data_dir) as client:
        _show(client.request("PUT", f"{_prefix(admin)}/routes/{name}", body=body), json)


@app.command("rm")
def remove(
    name: Name,
    admin: Admin = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Delete a route; its models stay."""
    with _connect(admin, url, api_key, admin_key, data_dir) as client:
        client.request("DELETE", f"{_prefix(admin)}/routes/{name}")
    say(f"The route {name} is deleted.")


def _model(strategy: str, text: str) -> JsonObject:
    """A model with its option, which stands behind the last `:` or `=`. Raises CommandFailed."""
    option, mark, kind = {
        "fallback": ("first_token_timeout_s", ":", float),
        "weights": ("weight", "=", int),
        "cascade": ("min_mean_logprob", ":", float),
    }[strategy]
    model, found, value = text.rpartition(mark)
    if not found:
        return {"model": text}
    try:
        return {"model": model, option: kind(value)}
    except ValueError:
        raise CommandFailed(f"{text}: {value!r} is no {option}.", exit_code=2) from None


def _show(route: JsonObject, as_json: bool) -> None:
    if as_json:
        show_json(route)
        return
    options = [name for name in _OPTIONS if any(each[name] is not None for each in route["models"])]
    show_table(("model", *options), route["models"])


def _prefix(admin: bool) -> str:
    return "/admin/v1" if admin else "/v1"


def _connect(
    admin: bool, url: str, api_key: str | None, admin_key: str | None, data_dir: Path
) -> "AbstractContextManager[Client]":
    return as_operator(url, admin_key, data_dir) if admin else as_tenant(url, api_key)
