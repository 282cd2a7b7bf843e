"""`chorale demo`: serves the model and adapters of `demo/` and prints requests to paste."""

import json
import time
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.adapter_push import push_with_progress
from server.cli.connection import connect
from server.cli.serve import base_url, is_ready, load, start_serving
from server.cli.terminal import CommandFailed, say, show
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.client.http import Client
    from server.launch.settings import Settings

_MODEL_NAME = "chorale-demo"
_TENANTS = {"acme": ("json", "shout", "agent"), "globex": ("python", "pirate")}
_LOGS = "logs"
_ARENA_BYTES = 256 << 20
_QUESTION = "What does a fox eat?"


def demo(
    model: Annotated[
        Path | None,
        typer.Option(exists=True, help="Folder of another model; it is served without adapters."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for database, keys and adapters.  [dim]default: .chorale[/dim]"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on.  [dim]default: 8000[/dim]")
    ] = None,
) -> None:
    """Serve the demo model with two tenants and five adapters, until Ctrl-C."""
    from server.launch.children import write_private
    from server.launch.supervisor import Interrupted

    folder = Path(str(files("demo")))
    if not (folder / "model").is_dir():
        raise CommandFailed(f"{folder / 'model'} is missing; `make demo-train` makes it.")
    started_at = time.monotonic()
    flags = {"model": str(folder / "model"), "model_name": _MODEL_NAME, "arena_bytes": _ARENA_BYTES}
    if model:
        flags = {"model": str(model), "model_name": model.absolute().name}
    settings = load({**flags, "data_dir": data_dir, "port": port})
    with start_serving(settings, logs=_LOGS) as (supervisor, settings):
        say(f"Starting engine and gateway; their logs are in {settings.data_dir / _LOGS}.")
        supervisor.run(until=lambda: is_ready(settings), may_restart=False)
        # Uploads have a lot of patience, with a full disk for example; a signal must not wait.
        with suppress(Interrupted), supervisor.interruptible():
            made = _provision(settings, None if model else folder / "adapters")
            write_private(settings.data_dir / "demo.json", made)
            say(f"Ready after {time.monotonic() - started_at:.1f} s.")
            _show_what_to_paste(made)
            _show_what_to_export(made, settings.data_dir)
            show("\nCtrl-C stops.")
        supervisor.run()
        say("Stopping; Ctrl-C again kills.")


def _provision(settings: "Settings", adapters: Path | None) -> JsonObject:
    """Make the missing tenants, keys and adapters. Returns the content of demo.json.

    adapters: folder of the tenants' adapters; without it they get none.
    """
    from server.launch.secrets import load_admin_key

    url, admin_key = base_url(settings), load_admin_key(settings.data_dir).key
    known_keys = _known_keys(settings.data_dir / "demo.json")
    tenants = []
    for name, adapter_names in _TENANTS.items():
        with connect(url, admin_key) as operator:
            tenant_id = _find_or_create(operator, name)
            api_key = _working_key(operator, url, tenant_id, known_keys.get(name))
        with connect(url, api_key) as client:
            if adapters:
                _push_missing(client, adapters, adapter_names)
        tenants.append(
            {
                "tenant_id": tenant_id,
                "name": name,
                "api_key": api_key,
                "adapters": list(adapter_names) if adapters else [],
            }
        )
    model = settings.model_name
    return {"base_url": url, "admin_key": admin_key, "model": model, "tenants": tenants}


def _known_keys(path: Path) -> dict[str, str]:
    """API keys of an earlier start, by tenant."""
    try:
        return {
            tenant["name"]: tenant["api_key"] for tenant in json.loads(path.read_text())["tenants"]
        }
    except (OSError, ValueError, KeyError):
        return {}


def _find_or_create(operator: "Client", name: str) -> str:
    from server.client.http import ApiRefused

    try:
        tenant = operator.request("GET", f"/admin/v1/tenants/{name}")
    except ApiRefused as error:
        if error.status != 404:
            raise
        tenant = operator.request("POST", "/admin/v1/tenants", body={"name": name})
    return str(tenant["tenant_id"])


def _working_key(operator: "Client", url: str, tenant_id: str, known: str | None) -> str:
    """The key of an earlier start if the server still accepts it, else a new one."""
    from server.client.http import ApiRefused, Client

    if known:
        try:
            with Client(url, known) as client:
                client.request("GET", "/v1/models")
            return known
        except ApiRefused as error:
            if error.status != 401:
                raise
    made = operator.request("POST", f"/admin/v1/tenants/{tenant_id}/keys", body={"name": "demo"})
    return str(made["api_key"])


def _push_missing(client: "Client", adapters: Path, names: tuple[str, ...]) -> None:
    """Push the adapters that cannot be served: new ones, and those of an earlier base model."""
    from server.cli.adapter_folder import AdapterFolder

    found = client.list_all("/v1/adapters", "after", "id")
    served = {a["id"] for a in found if a["latest"] and a["latest"]["is_servable"]}
    for name in names:
        if name not in served:
            push_with_progress(client, AdapterFolder.find(adapters / name), name)


def _show_what_to_paste(made: JsonObject) -> None:
    url, tenants = made["base_url"], made["tenants"]
    show(f"\nIn a browser:\n\n  {url}/#keys={','.join(t['api_key'] for t in tenants)}")
    show(f"  {url}/console (paste one of the keys below, or the admin key)\n")
    for tenant in tenants:
        show(f"In a shell, as {tenant['name']}:\n")
        for model in (made["model"], *tenant["adapters"]):
            show(f"  {_curl(url, tenant['api_key'], model)}")
        show("")
    show("In Python, with OpenAI's client (pip install openai):\n")
    for line in _python(url, tenants[0]["api_key"], [*tenants[0]["adapters"], made["model"]][0]):
        show(line)  # without spaces before it, which Python would not take


def _show_what_to_export(made: JsonObject, data_dir: Path) -> None:
    """Print the variables that the commands of `chorale` read."""
    url, tenant = made["base_url"], made["tenants"][0]
    show(f"\nFor `chorale` commands in another terminal, as {tenant['name']} and as operator:\n")
    show(f"  export CHORALE_URL={url} CHORALE_API_KEY={tenant['api_key']}")
    show(f"  export CHORALE_ADMIN_KEY=$(cat {data_dir.resolve() / 'admin.key'})")


def _curl(url: str, key: str, model: str) -> str:
    messages = [{"role": "user", "content": _QUESTION}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0})
    return (
        f"curl -s {url}/v1/chat/completions -H 'authorization: Bearer {key}'"
        f" -H 'content-type: application/json' -d '{body}'"
    )


def _python(url: str, key: str, model: str) -> list[str]:
    return [
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="{key}")',
        f'model, messages = "{model}", [{{"role": "user", "content": "{_QUESTION}"}}]',
        "answer = client.chat.completions.create(model=model, messages=messages, temperature=0)",
        "print(answer.choices[0].message.content)",
    ]
