"""`chorale routes`: names for several models, of a tenant or, with --admin, of the operator."""

from operator import itemgetter
from typing import Annotated, Any

import typer

from server.cli.api_command import api_command, table
from server.cli.terminal import CommandFailed, say, show_table
from server.text.json_object import JsonObject

app = typer.Typer(no_args_is_help=True, help="Routes: names for several models.")

Name = Annotated[str, typer.Argument(help="Name of the route.")]
Admin = Annotated[
    bool, typer.Option("--admin", help="The operator's routes, which every tenant may name.")
]

_OPTIONS = ("first_token_timeout_s", "weight", "min_mean_logprob")


def _show(route: JsonObject) -> None:
    options = [name for name in _OPTIONS if any(each[name] is not None for each in route["models"])]
    show_table(("model", *options), route["models"])


_LIST = table(
    ("id", "strategy", "models"),
    lambda route: {**route, "models": [each["model"] for each in route["models"]]},
    empty="There are no routes yet: chorale routes set NAME --fallback MODEL,MODEL",
)


@api_command(app, "list", operator=itemgetter("admin"), show=_LIST)
def list_routes(client: Any, admin: Admin = False) -> Any:
    """List routes with the models of each."""
    return client.request("GET", f"{_prefix(admin)}/routes")["data"]


@api_command(app, "show", operator=itemgetter("admin"), show=_show)
def show_route(client: Any, name: Name, admin: Admin = False) -> Any:
    """Show the models of a route, in order."""
    return client.request("GET", f"{_prefix(admin)}/routes/{name}")


@api_command(app, "set", operator=itemgetter("admin"), show=_show)
def set_route(
    client: Any,
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
) -> Any:
    """Make or change a route: small,large or a=90,b=10 or small:-0.2,large."""
    given = {"fallback": fallback, "weights": weights, "cascade": cascade}
    chosen = {strategy: text for strategy, text in given.items() if text is not None}
    if len(chosen) != 1:
        raise CommandFailed("Give one of --fallback, --weights and --cascade.", exit_code=2)
    ((strategy, text),) = chosen.items()
    models = [_model(strategy, each) for each in text.split(",")]
    body = {"strategy": strategy, "models": models}
    return client.request("PUT", f"{_prefix(admin)}/routes/{name}", body=body)


@api_command(app, "rm", operator=itemgetter("admin"))
def remove(client: Any, name: Name, admin: Admin = False) -> None:
    """Delete a route; its models stay."""
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


def _prefix(admin: bool) -> str:
    return "/admin/v1" if admin else "/v1"
