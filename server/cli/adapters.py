"""`chorale adapters`: a tenant's own adapters."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.connection import DEFAULT_URL, ApiKey, Json, Url, as_tenant
from server.cli.terminal import say, show_json, show_table, stderr

if TYPE_CHECKING:
    from server.http_client import Client

app = typer.Typer(no_args_is_help=True, help="A tenant's own adapters.")

_SHORT_DIGEST = 12

Name = Annotated[str, typer.Argument(help="The adapter's name.")]


@app.command("push")
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder as PEFT saves it.")],
    name: Annotated[str, typer.Option(help="What requests will call it.")],
    alias: Annotated[str | None, typer.Option(help="To point to this version.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Upload an adapter as a new version; an upload that broke off goes on where it stopped."""
    with as_tenant(url, api_key) as client:
        answer = push_with_progress(client, folder, name, alias)
    if json:
        show_json(answer)
        return
    version = answer["version"]
    say(f"[bold]{answer['adapter']}@{version['version']}[/bold] is published.")
    _show_passport(version)


@app.command("list")
def list_adapters(url: Url = DEFAULT_URL, api_key: ApiKey = None, json: Json = False) -> None:
    """All adapters, with the newest version of each."""
    with as_tenant(url, api_key) as client:
        found = client.list_all("/v1/adapters", "after", "id")
    if json:
        show_json(found)
    elif found:
        columns = ("name", "version", "rank", "size_bytes", "tier", "aliases", "digest")
        show_table(columns, [_row(adapter) for adapter in found])
    else:
        say("There are no adapters yet: chorale adapters push DIR --name NAME")


@app.command("show")
def show_adapter(
    name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None, json: Json = False
) -> None:
    """One adapter: its aliases, and the passport of its newest version."""
    with as_tenant(url, api_key) as client:
        adapter = client.request("GET", f"/v1/adapters/{name}")
    if json:
        show_json(adapter)
        return
    show_table(("name", "aliases"), [{"name": adapter["id"], "aliases": adapter["aliases"]}])
    if adapter["latest"]:
        _show_passport(adapter["latest"])


@app.command("versions")
def list_versions(
    name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None, json: Json = False
) -> None:
    """Every version of an adapter, the newest first."""
    with as_tenant(url, api_key) as client:
        found = client.list_all(f"/v1/adapters/{name}/versions", "before", "version")
    if json:
        show_json(found)
    else:
        show_table(("version", "rank", "size_bytes", "state", "tier", "digest"), found)


@app.command("alias")
def set_alias(
    name: Name,
    alias: Annotated[str, typer.Argument(help="The alias; requests name it as NAME@ALIAS.")],
    version: Annotated[int, typer.Argument(help="The version it points to from now on.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Point an alias to a version."""
    with as_tenant(url, api_key) as client:
        path = f"/v1/adapters/{name}/aliases/{alias}"
        client.request("PUT", path, body={"version": version})
    say(f"{name}@{alias} is version {version} now.")


@app.command("rm")
def remove(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Delete an adapter with all its versions."""
    with as_tenant(url, api_key) as client:
        client.request("DELETE", f"/v1/adapters/{name}")
    say(f"{name} is deleted.")


def push_with_progress(
    client: "Client", folder: Path, name: str, alias: str | None = None
) -> dict[str, Any]:
    """Upload with a bar on stderr; the answer of the upload's completion."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from server.http_client import UploadMemory

    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=stderr()) as bar:
        task = bar.add_task(name, total=None)

        def on_progress(sent_bytes: int, size_bytes: int) -> None:
            bar.update(task, completed=sent_bytes, total=size_bytes)

        memory = UploadMemory(_memory_path(client.base_url, folder, name))
        return client.push(name, folder, alias=alias, memory=memory, on_progress=on_progress)


def _memory_path(base_url: str, folder: Path, name: str) -> Path:
    """Where an unfinished push of this folder is remembered."""
    what = f"{base_url}\n{folder.resolve()}\n{name}"
    cache = Path(typer.get_app_dir("chorale")) / "uploads"
    return cache / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"


def _row(adapter: dict[str, Any]) -> dict[str, Any]:
    latest = adapter["latest"] or {}
    short = {"digest": latest.get("digest", "")[:_SHORT_DIGEST]}
    return {"name": adapter["id"], "aliases": adapter["aliases"], **latest, **short}


def _show_passport(version: dict[str, Any]) -> None:
    """What the registry found in a version, and for which base it holds."""
    names = ("version", "digest", "base_revision", "rank", "size_bytes", "is_servable")
    facts = {name: version.get(name) for name in names} | (version.get("passport") or {})
    show_table(("passport", ""), [{"passport": name, "": fact} for name, fact in facts.items()])
