"""`chorale adapters alias | rollback | moves`: which version an alias means, and which it meant."""

from typing import Annotated, Any

import typer

from server.cli.api_command import table
from server.cli.connection import Name
from server.cli.terminal import CommandFailed, say
from server.cli.units import moment
from server.client.paths import adapter_path
from server.text.json_object import JsonObject

Alias = Annotated[str, typer.Argument(help="The alias; requests name it as NAME@ALIAS.")]


def set_alias(
    client: Any,
    name: Name,
    alias: Alias,
    version: Annotated[int, typer.Argument(help="The version it points to from now on.")],
    canary: Annotated[
        int | None, typer.Option(help="Another version, for --percent of the requests.")
    ] = None,
    percent: Annotated[
        int | None, typer.Option(min=1, max=99, help="Percent of the requests that get --canary.")
    ] = None,
) -> None:
    """Point an alias to a version, and for a percentage of the requests to another one."""
    if (canary is None) != (percent is None):
        raise CommandFailed("--canary and --percent go together.", exit_code=2)
    body: JsonObject = {"version": version}
    if canary is not None:
        body["canary"] = {"version": canary, "percent": percent}
    adapter = client.request("PUT", adapter_path(name, "aliases", alias), body=body)
    _say_meaning(name, alias, adapter)


def roll_back(client: Any, name: Name, alias: Alias) -> None:
    """Point an alias to the version before its last move; a second rollback undoes the first."""
    before = client.request("GET", adapter_path(name))
    adapter = client.request("POST", adapter_path(name, "aliases", alias, "rollback"))
    _say_meaning(name, alias, adapter, before)


def list_moves(client: Any, name: Name, alias: Alias) -> Any:
    """List the versions that an alias has meant, the latest move first, and who moved it."""
    return client.list_all(adapter_path(name, "aliases", alias, "moves"), "before", "id")


def as_share(canary: dict[str, int] | None) -> str | None:
    """The split in words, such as "10 % to 4"; None where there is none."""
    return f"{canary['percent']} % to {canary['version']}" if canary else None


show_moves = table(
    ("moved_at", "version", "canary", "moved_by"),
    lambda move: {
        **move, "moved_at": moment(move["moved_at"]), "canary": as_share(move["canary"])
    },
)  # fmt: skip


def _say_meaning(
    name: str, alias: str, adapter: JsonObject, before: JsonObject | None = None
) -> None:
    """Say what the alias means now.   before: the adapter before a change that may end a split."""
    share = as_share(adapter["canaries"].get(alias))
    beside = f", {share}" if share else ""
    ended = as_share(before["canaries"].get(alias)) if before and not share else None
    note = f" Its split, {ended}, has ended." if ended else ""
    say(f"{name}@{alias} is version {adapter['aliases'][alias]} now{beside}.{note}")
