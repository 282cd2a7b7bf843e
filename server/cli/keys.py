"""`chorale keys`: manages API keys, and makes a new admin key."""

import sys
import time
from typing import Annotated, Any

import typer

from server.cli.api_command import Given, api_command, table
from server.cli.beside import DatabaseUrl, ServerDir, open_beside
from server.cli.connection import DEFAULT_DATA_DIR
from server.cli.options import MaxConcurrency, RequestsPerMinute, TokensPerMinute
from server.cli.terminal import CommandFailed, confirm, say, show
from server.cli.units import moment, time_option
from server.text.json_object import JsonObject

app = typer.Typer(
    no_args_is_help=True, help="API keys: those of any tenant (operator), or one's own."
)

Tenant = Annotated[
    str | None,
    typer.Argument(
        help="Id or name of a tenant. By default the tenant of the API key, which needs the scope "
        "admin."
    ),
]
KeyId = Annotated[str, typer.Argument(help="Id of the key, as `chorale keys list` shows it.")]

_DAY_S = 86_400
_COLUMNS = (
    "key_id", "name", "prefix", "scopes", "created_by", "expires_at", "last_used_at", "state",
)  # fmt: skip


def _as_row(key: JsonObject) -> JsonObject:
    times = {name: key.get(name) and moment(key[name]) for name in ("expires_at", "last_used_at")}
    is_over = bool(key.get("expires_at")) and key["expires_at"] <= time.time()
    state = "revoked" if key.get("revoked_at") else "expired" if is_over else "active"
    return {**key, **times, "state": state}


def _is_operators(given: Given) -> bool:
    return given["tenant"] is not None or given.get("of_tenant", False)


def _show_new(key: JsonObject) -> None:
    say(f"Key {key['key_id']}, shown only this once:")
    show(key["api_key"])


@api_command(app, "create", operator=_is_operators, show=_show_new)
def create(
    client: Any,
    tenant: Tenant = None,
    name: Annotated[str, typer.Option(help="Name to tell the key from others.")] = "",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What the key may do: inference, adapters:read, adapters:write, usage:read or "
            "admin; repeatable. By default all but admin."
        ),
    ] = None,
    expires_at: Annotated[
        int | None, time_option("When the key expires; by default never.")
    ] = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrency: MaxConcurrency = None,
) -> Any:
    """Make a key and show it, once: the server keeps only its HMAC."""
    terms = {
        "scopes": scope,
        "expires_at": expires_at,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrency": max_concurrency,
    }
    body = {"name": name} | {field: value for field, value in terms.items() if value}
    return _new(client.request("POST", _path(tenant), body=body))


@api_command(app, "list", operator=_is_operators, show=table(_COLUMNS, _as_row))
def list_keys(client: Any, tenant: Tenant = None) -> Any:
    """List keys, revoked ones too, and when each was used last."""
    return client.list_all(_path(tenant), "after", "key_id")


@api_command(app, "rotate", operator=_is_operators, show=_show_new)
def rotate(
    client: Any,
    key_id: KeyId,
    tenant: Tenant = None,
    overlap_s: Annotated[
        int | None,
        typer.Option(
            help="Seconds for which the old key stays valid, at most 7 days; by default a day."
        ),
    ] = None,
    compromised: Annotated[
        bool,
        typer.Option(
            "--compromised",
            help="Revoke the old key at once, its other rotations, the keys that they made, and so "
            "on.",
        ),
    ] = False,
) -> Any:
    """Make a key that replaces another, which expires after the overlap.

    The new key goes on with what is left of the old one's limits.
    """
    path = f"{_path(tenant)}/{key_id}/rotate"
    if overlap_s is None:
        overlap_s = 0 if compromised else _DAY_S
    body = {"overlap_s": overlap_s} | ({"compromised": True} if compromised else {})
    return _new(client.request("POST", path, body=body))


@api_command(app, "revoke", operator=_is_operators)
def revoke(
    client: Any,
    key_id: Annotated[
        str, typer.Argument(help="Id of the key, or with --all the id or name of the tenant.")
    ],
    tenant: Tenant = None,
    cascade: Annotated[
        bool,
        typer.Option(
            "--cascade",
            help="Revoke its other rotations, the keys that they made, and so on, as well. Without "
            "it these stay valid, but make no keys any more.",
        ),
    ] = False,
    of_tenant: Annotated[
        bool, typer.Option("--all", help="Revoke all keys of a tenant; for the operator.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation of --all.")
    ] = False,
) -> None:
    """Revoke a key, or all of a tenant: they are refused from now on."""
    path, params = f"{_path(tenant)}/{key_id}", {"cascade": cascade or None}
    if of_tenant:
        if tenant is not None or cascade:
            raise CommandFailed("--all takes only the name of the tenant.", exit_code=2)
        if not yes:
            confirm(f"Revoke all keys of {key_id}?")
        tenant, path = key_id, _path(key_id)
    ended = client.request("DELETE", path, params=params)["ended"]
    say(f"Revoked: {', '.join(ended)}." if ended else "Nothing was left to revoke.")


@app.command("reset-admin")
def reset_admin(data_dir: ServerDir = DEFAULT_DATA_DIR, database_url: DatabaseUrl = None) -> None:
    """Make a new admin key, on the server's own machine; the old one is refused within 5 s."""
    from registry.catalog.audit import record_audit
    from server.database.clock import now_ms
    from server.launch.secrets import replace_secret

    path = data_dir / "admin.key"
    if not path.exists():
        raise CommandFailed(f"There is no {path}: the server has its key from CHORALE_ADMIN_KEY.")
    with open_beside(data_dir, database_url) as database:
        # The audit row comes first: better a row without a new key than the reverse.
        database.write_sync(
            lambda conn: record_audit(
                conn, None, "admin_key.reset", target="admin.key", at_ms=now_ms(), actor="operator"
            )
        )
    key = replace_secret(path)
    say(f"The new admin key is in {path}")
    if sys.stderr.isatty():
        say(f"It is [bold]{key}[/bold]")


def _path(tenant: str | None) -> str:
    return "/v1/keys" if tenant is None else f"/admin/v1/tenants/{tenant}/keys"


def _new(key: JsonObject) -> JsonObject:
    """The answer with the key itself first, since it alone cannot be asked for again."""
    return {"api_key": key["api_key"], **key}
