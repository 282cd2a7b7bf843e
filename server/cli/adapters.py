"""`chorale adapters`: a tenant's own adapters."""

from typing import Annotated, Any

import typer

from server.cli import adapter_aliases, adapter_convert, adapter_push, adapter_sharing
from server.cli.adapter_aliases import as_share
from server.cli.adapter_sharing import size_and_price
from server.cli.api_command import api_command, table
from server.cli.connection import Name
from server.cli.passport import show_passport
from server.cli.terminal import confirm, say, show_facts, show_json, show_table
from server.cli.units import megabytes, moment
from server.client.paths import adapter_path
from server.text.json_object import JsonObject

app = typer.Typer(no_args_is_help=True, help="A tenant's own adapters.")

_SHORT_DIGEST = 12

Version = Annotated[
    int | None, typer.Option(min=1, help="Only this version, not the whole adapter.")
]

api_command(app, "push")(adapter_push.push)
api_command(app, "import")(adapter_push.import_all)
api_command(app, "validate")(adapter_push.validate)
api_command(app, "prove")(adapter_push.prove)
app.command("convert")(adapter_convert.convert)


@api_command(app, "list")
def list_adapters(
    client: Any,
    json: bool,
    search: Annotated[str | None, typer.Option(help="Only names with this text in them.")] = None,
) -> None:
    """List all adapters, each with the version of its alias latest."""
    found = client.list_all("/v1/adapters", "after", "id", {"search": search})
    if json:
        show_json(found)
    elif found:
        columns = ("name", "version", "base", "rank", "size", "tier", "aliases", "digest")
        show_table(columns, [_row(adapter) for adapter in found])
    elif search:
        say("No adapter has this in its name.")
    else:
        say("There are no adapters yet: chorale adapters push DIR --name NAME")


def _show(adapter: JsonObject) -> None:
    pin = adapter["pin"]
    canaries = {alias: as_share(canary) for alias, canary in adapter["canaries"].items()}
    facts = [
        ("name", adapter["id"]),
        ("created", moment(adapter["created_at"])),
        ("aliases", adapter["aliases"]),
        ("canaries", canaries),
        ("pin", pin and f"version {pin['version']}, {size_and_price(pin)}"),
        *([("pinned since", moment(pin["since"]))] if pin else []),
        ("granted to", _tenants(adapter["grants"], "accepted")),
        ("offered to", _tenants(adapter["grants"], "offered")),
    ]
    show_facts("adapter", facts)
    if latest := adapter["latest"]:
        show_passport(latest["passport"], latest)


@api_command(app, "show", show=_show)
def show_adapter(client: Any, name: Name) -> Any:
    """Show one adapter: aliases, pin, grants, and the passport of the version of alias latest."""
    adapter = client.request("GET", adapter_path(name))
    return {**adapter, "grants": client.request("GET", adapter_path(name, "grants"))["data"]}


@api_command(
    app,
    "versions",
    show=table(
        ("version", "state", "base", "rank", "size", "tier", "created", "digest"),
        lambda version: _version_row(version),
    ),
)
def list_versions(
    client: Any,
    name: Name,
    deleted: Annotated[
        bool, typer.Option("--deleted", help="Also list the deleted versions.")
    ] = False,
) -> Any:
    """List every version of an adapter, the newest first."""
    params = {"include_deleted": True} if deleted else None
    return client.list_all(adapter_path(name, "versions"), "before", "version", params)


api_command(app, "alias")(adapter_aliases.set_alias)
api_command(app, "rollback")(adapter_aliases.roll_back)
api_command(app, "moves", show=adapter_aliases.show_moves)(adapter_aliases.list_moves)
api_command(app, "pin")(adapter_sharing.pin)
api_command(app, "unpin")(adapter_sharing.unpin)
api_command(app, "grant")(adapter_sharing.grant)
api_command(app, "revoke")(adapter_sharing.revoke)
api_command(app, "offers")(adapter_sharing.list_offers)
api_command(app, "accept")(adapter_sharing.accept)
api_command(app, "decline")(adapter_sharing.decline)


@api_command(app, "rm")
def remove(
    client: Any,
    name: Name,
    version: Version = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete an adapter with all its versions, or one version; `restore` brings it back."""
    if not yes:
        with_what = "" if version else " with all its versions and aliases"
        confirm(f"Delete {_shown(name, version)}{with_what}?")
    client.request("DELETE", _path(name, version))
    say(f"{_shown(name, version)} is deleted; `restore` brings it back while the server keeps it.")


@api_command(app, "restore")
def restore(client: Any, name: Name, version: Version = None) -> None:
    """Bring back a deleted adapter or version, with its aliases as they were."""
    client.request("POST", f"{_path(name, version)}/restore")
    say(f"{_shown(name, version)} is back.")


def _path(name: str, version: int | None) -> str:
    return adapter_path(name) if version is None else adapter_path(name, "versions", version)


def _shown(name: str, version: int | None) -> str:
    return name if version is None else f"{name}@{version}"


def _row(adapter: JsonObject) -> JsonObject:
    latest = _version_row(adapter["latest"]) if adapter["latest"] else {}
    return {**latest, "name": adapter["id"], "aliases": adapter["aliases"]}


def _version_row(version: JsonObject) -> JsonObject:
    return {
        **version,
        "base": version["base_model"],
        "size": megabytes(version["size_bytes"]),
        "created": moment(version["created_at"]),
        "digest": version["digest"][:_SHORT_DIGEST],
    }


def _tenants(grants: list[JsonObject], status: str) -> list[str]:
    return [grant["tenant"] for grant in grants if grant["status"] == status]
