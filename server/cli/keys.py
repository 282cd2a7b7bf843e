"""`chorale keys`: API keys of tenants."""

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
from server.cli.terminal import say, show, show_json, show_table

app = typer.Typer(no_args_is_help=True, help="API keys of tenants (operator).")

Tenant = Annotated[str, typer.Argument(help="Id or name of the tenant.")]


@app.command("create")
def create(
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="To tell it from others.")] = "",
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """Make a key. It is shown now and never again: the server keeps only its HMAC."""
    with as_operator(url, admin_key, data_dir) as client:
        key = client.request("POST", f"/admin/v1/tenants/{tenant}/keys", body={"name": name})
    if json:
        show_json(key)
        return
    say(f"Key {key['key_id']}, shown only this once:")
    show(key["api_key"])


@app.command("list")
def list_keys(
    tenant: Tenant,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    json: Json = False,
) -> None:
    """A tenant's keys, revoked ones too."""
    with as_operator(url, admin_key, data_dir) as client:
        found = client.request("GET", f"/admin/v1/tenants/{tenant}/keys")["data"]
    if json:
        show_json(found)
        return
    rows = [{**key, "state": "revoked" if key.get("revoked_at") else "active"} for key in found]
    show_table(("key_id", "name", "prefix", "scopes", "state"), rows)


@app.command("revoke")
def revoke(
    tenant: Tenant,
    key_id: Annotated[str, typer.Argument(help="Of `chorale keys list`.")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Refuse a key from now on."""
    with as_operator(url, admin_key, data_dir) as client:
        client.request("DELETE", f"/admin/v1/tenants/{tenant}/keys/{key_id}")
    say(f"Key {key_id} is revoked.")
