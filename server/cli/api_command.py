"""Commands that ask a server: each is a function of the API's client, which is its first parameter.

The options that say which server and with which key are added to the function's own parameters.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from server.cli.options import set_options
from server.cli.terminal import say, show_json, show_table
from server.text.json_object import JsonObject

Ask = Callable[..., Any]
Given = Mapping[str, Any]
"""The arguments and options that a command was called with, by the names of the parameters."""

_OPERATORS = ("url", "admin_key", "data_dir")
_TENANTS = ("url", "api_key")
_EITHER = ("url", "api_key", "admin_key", "data_dir")


def api_command(
    app: typer.Typer,
    name: str,
    *,
    operator: bool | Callable[[Given], bool] = False,
    show: Callable[[Any], None] | None = None,
    **options: Any,
) -> Callable[[Ask], Ask]:
    """Add a command to `app`: a function of the client and of what the command was given.

    operator: whether the client has the admin key and not a tenant's, or a function that says so.
    show: prints what the function returns; with --json it is printed as JSON. Without `show` the
    function prints, and has a parameter `json` if there is such an option.
    options: of the client, such as read_timeout_s.
    """

    def add(ask: Ask) -> Ask:
        _, *own = inspect.signature(ask).parameters.values()
        takes_json = any(each.name == "json" for each in own)

        def command(
            url: Url = DEFAULT_URL, api_key: ApiKey = None, admin_key: AdminKey = None,
            data_dir: DataDir = DEFAULT_DATA_DIR, json: Json = False, **given: Any,
        ) -> None:  # fmt: skip
            is_operators = operator(given) if callable(operator) else operator
            reached = (
                as_operator(url, admin_key, data_dir, **options)
                if is_operators
                else as_tenant(url, api_key, **options)
            )
            with reached as client:
                found = ask(client, **given, **({"json": json} if takes_json else {}))
            if show is not None:
                (show_json if json else show)(found)

        names = _EITHER if callable(operator) else _OPERATORS if operator else _TENANTS
        shared = inspect.signature(command).parameters
        added = [shared[each] for each in names]
        added += [shared["json"]] if takes_json or show else []
        parameters = [*(each for each in own if each.name != "json"), *added]
        set_options(command, parameters)
        app.command(name, help=inspect.getdoc(ask))(command)
        return ask

    return add


def table(
    columns: Sequence[str],
    as_row: Callable[[Any], JsonObject] = dict,
    *,
    empty: str | None = None,
) -> Callable[[Any], None]:
    """Return a function that shows one answer, or a list of them, as a table.

    empty: is said in place of a table without rows.
    """

    def show(found: Any) -> None:
        if empty and not found:
            say(empty)
            return
        rows = found if isinstance(found, list) else [found]
        show_table(columns, [as_row(row) for row in rows])

    return show
