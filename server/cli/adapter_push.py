"""`chorale adapters push | import | validate | prove`: make new versions, or check their files."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json import loads
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.markup import escape

from server.cli.connection import Name
from server.cli.passport import show_passport
from server.cli.terminal import CommandFailed, say, show_json, show_table
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.cli.adapter_folder import AdapterFolder
    from server.client.http import Client
    from server.client.uploads import Pushed, UploadMemory

_Import: TypeAlias = tuple[JsonObject, "AdapterFolder | None"]

# An import waits this long for its turn, since an hourly quota has room again within the hour.
_IMPORT_TURN_WAIT_S = 3600.0

Alias = Annotated[str | None, typer.Option(help="Alias to point to the new version.")]
BaseModelName = Annotated[
    str | None,
    typer.Option(
        "--base-model", metavar="NAME", help="Its base model, where its config leaves it unclear."
    ),
]
Direct = Annotated[
    bool, typer.Option("--direct", help="Send the files straight to the object store.")
]
Source = Annotated[
    str,
    typer.Argument(help="Folder of an adapter, as a trainer wrote it, or a hub id (org/name)."),
]


def push(
    client: "Client",
    json: bool,
    source: Source,
    name: Annotated[str, typer.Option(help="Name by which requests call the adapter.")],
    alias: Alias = None,
    response_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Format of its tool calls: a built-in one, or a JSON file that describes it.",
        ),
    ] = None,
    base_model: BaseModelName = None,
    direct: Direct = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the hub's repository.")
    ] = None,
) -> None:
    """Upload an adapter as a new version; an interrupted upload is resumed where it stopped."""
    template, adapter = _template(response_template), _find(source, revision)
    with _report(json):
        pushed = push_with_progress(
            client, adapter, name, alias=alias, direct=direct,
            response_template=template, base_model=base_model,
        )  # fmt: skip
    if json:
        show_json(pushed.upload)
        return
    version = pushed.upload["version"]
    what = "was there already" if pushed.is_known else "is published"
    say(f"[bold]{name}@{version['version']}[/bold] {what}.")
    show_passport(version["passport"], version)


def validate(
    client: "Client",
    json: bool,
    source: Source,
    base_model: BaseModelName = None,
) -> None:
    """Check an adapter as a push would, without proving it in an engine; nothing is kept."""
    from server.cli.upload_bar import UploadBar
    from server.client.files import size_bytes_of
    from server.client.uploads import Uploader

    with _report(json), _find(source).as_sent() as folder:
        size_bytes = size_bytes_of(folder)
        with UploadBar(size_bytes) as bar:
            bar.begin(Path(source).resolve().name, size_bytes)
            upload = Uploader(client).validate(folder, bar, base_model=base_model)
    if json:
        show_json(upload)
        return
    base = upload["base_model"]
    say(f"The files are an adapter of the base model [bold]{base}[/bold]. Nothing was kept.")
    show_passport(upload["passport"])


def prove(
    client: "Client",
    json: bool,
    name: Name,
    version: Annotated[
        int, typer.Argument(min=1, help="Version that was made for another base model.")
    ],
    alias: Alias = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Base model to prove it on, where several are served."),
    ] = None,
) -> None:
    """Prove a version on another base model and publish it; nothing is uploaded."""
    from server.client.uploads import Uploader

    with _report(json):
        upload = Uploader(client).prove_again(name, version, alias, base_model=base_model)
    if json:
        show_json(upload)
        return
    proved = upload["version"]
    say(f"[bold]{name}@{proved['version']}[/bold] is published.")
    show_passport(proved["passport"], proved)


def import_all(
    client: "Client",
    json: bool,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that holds a folder of each adapter.")
    ],
    alias: Alias = None,
    direct: Direct = False,
) -> None:
    """Push every adapter in a folder, each under the name of its own folder; resumable."""
    _check_alias(alias)
    rows = _push_all(client, _adapters_in(folder), alias=alias, direct=direct)
    if json:
        show_json(rows)
    else:
        is_renamed = any(row["name"] != row["folder"] for row in rows)
        columns = ("name", "version", "outcome")
        show_table(("folder", *columns) if is_renamed else columns, rows)
    failed = sum(row["version"] is None for row in rows)
    if failed:
        raise CommandFailed(f"{failed} of {len(rows)} adapters were not imported.")


def _template(given: str | None) -> str | JsonObject | None:
    """The description in a file, or the name of a built-in format. Raises CommandFailed."""
    if given is None or not ("/" in given or given.endswith(".json") or Path(given).is_file()):
        return given
    try:
        described: JsonObject = loads(Path(given).read_text(encoding="utf-8"))
    except ValueError:
        raise CommandFailed(f"{given} is not JSON.") from None
    return described


def push_with_progress(
    client: "Client", adapter: "AdapterFolder", name: str, **options: Any
) -> "Pushed":
    """Upload an adapter with a progress bar on stderr. Raises ClientError.

    options: of `Uploader.push`.
    """
    from server.cli.upload_bar import UploadBar
    from server.client.files import size_bytes_of
    from server.client.uploads import Uploader

    # A converted adapter is remembered under the folder that it was made of.
    memory = _memory(client.base_url, adapter.folder, name)
    with adapter.as_sent() as folder, UploadBar(size_bytes := size_bytes_of(folder)) as bar:
        bar.begin(name, size_bytes)
        return Uploader(client).push(name, folder, memory=memory, watcher=bar, **options)


def _push_all(client: "Client", imports: list[_Import], **options: Any) -> list[JsonObject]:
    """Push the adapters in order. Returns a row for each that says what became of it.

    After a failure that every adapter would meet, the others are not tried.
    """
    from server.cli.upload_bar import UploadBar
    from server.client.http import ClientError
    from server.client.patience import Patience
    from server.client.uploads import Uploader

    uploader = Uploader(client, Patience(turn_wait_s=_IMPORT_TURN_WAIT_S))
    sizes = [adapter.size_bytes if adapter else 0 for _, adapter in imports]
    with UploadBar(sum(sizes)) as bar:
        for (row, adapter), size_bytes in zip(imports, sizes, strict=True):
            if adapter is None:
                continue
            name = row["name"]
            bar.begin(name, size_bytes)
            memory = _memory(client.base_url, adapter.folder, name)
            try:
                with adapter.as_sent() as folder:
                    pushed = uploader.push(name, folder, memory=memory, watcher=bar, **options)
            except ClientError as error:
                row |= {"outcome": str(error), "code": getattr(error, "code", None)}
                if error.is_common:
                    break
            else:
                row["version"] = pushed.upload["version"]["version"]
                row["outcome"] = "was there already" if pushed.is_known else "published"
        bar.end()
    return [row for row, _ in imports]


def _adapters_in(parent: Path) -> list[_Import]:
    """List what to import: the result's row for each folder, and its adapter if it can be pushed.

    Folders that are names themselves come first. Raises CommandFailed.
    """
    from registry.catalog.names import is_name
    from server.cli.adapter_folder import AdapterFolder
    from server.client.files import NotAnAdapter
    from server.client.http import ClientError

    folders = sorted(path for path in parent.iterdir() if path.is_dir())
    imports: dict[str, _Import] = {}
    for folder in sorted(folders, key=lambda path: not is_name(path.name)):
        name, adapter, outcome = folder.name, None, "not tried"
        try:
            adapter = AdapterFolder.find(folder)
        except NotAnAdapter as error:
            if not error.is_partial:
                continue
            outcome = str(error)
        except ClientError as error:
            outcome = str(error)
        if not is_name(name):
            derived = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("._-")[:64]
            if is_name(derived) and derived not in imports:
                name = derived
            else:
                why = f"{derived} is taken" if derived else "no name can be made of it"
                outcome = f"{why}: chorale adapters push {quote(str(folder))} --name NAME"
                adapter = None
        row = {"name": name, "folder": folder.name, "version": None, "outcome": outcome}
        imports[name] = ({**row, "code": None}, adapter)
    if not imports:
        raise CommandFailed(f"{parent} has no folders with adapters in them.", exit_code=2)
    return list(imports.values())


def _check_alias(alias: str | None) -> None:
    from registry.catalog.names import check_alias
    from registry.errors import Invalid

    try:
        check_alias(alias or "latest")
    except Invalid as error:
        raise CommandFailed(str(error), exit_code=2) from error


def _find(source: str, revision: str | None = None) -> "AdapterFolder":
    """The adapter of a folder or hub id; what is left out is said. Raises CommandFailed.

    revision: of the hub's repository.
    """
    from server.cli import hub
    from server.cli.adapter_folder import AdapterFolder

    if Path(source).is_dir():
        if revision is not None:
            raise CommandFailed("--revision is of a hub's repository, not of a folder.", 2)
        adapter = AdapterFolder.find(Path(source))
    elif hub.is_hub_id(source):
        adapter = hub.download(source, revision)
    else:
        raise CommandFailed(f"{source} is no folder, and no hub id (org/name) either.", 2)
    for note in adapter.layout.notes(source.rstrip("/")):
        say(escape(note))
    return adapter


@contextmanager
def _report(as_json: bool) -> Iterator[None]:
    """Print a refused upload as JSON on stdout if asked for; its error ends the command anyway."""
    from server.client.uploads import NotProvedYet, UploadFailed

    try:
        yield
    except (NotProvedYet, UploadFailed) as error:
        if as_json:
            show_json(error.upload)
        raise


def _memory(base_url: str, folder: Path, name: str) -> "UploadMemory":
    """The memory of an unfinished push of this folder to this server under this name."""
    from server.client.uploads import UploadMemory

    what = f"{base_url}\n{folder.resolve()}\n{name}"
    cache = Path(typer.get_app_dir("chorale")) / "uploads"
    return UploadMemory(cache / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.json")
