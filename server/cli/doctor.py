"""`chorale doctor`: what is wrong with an installation, and what to do about it."""

import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.beside import gateway_settings
from server.cli.connection import DEFAULT_DATA_DIR, AdminKey, ApiKey, Json
from server.cli.options import set_options
from server.cli.serve import base_url, flags_of, load, serve
from server.cli.terminal import CommandFailed, say, show_json, show_table, stderr
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.cli.checks.check import Check, Finding
    from server.launch.settings import Settings

_MEND = "Mend it in the file, the environment or the flags."
_LOG = "Look at the gateway's log."
_STYLES = {"wrong": "red", "warning": "yellow", "skipped": "dim"}


def doctor(
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="CHORALE_DATA_DIR", help="The server's folder, .chorale by default."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="URL of the running server, by default that of its host and port."),
    ] = None,
    admin_key: AdminKey = None,
    api_key: ApiKey = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Check configuration, machine, database, store, Redis, clocks, and the server if it runs.

    Run it as the server's user, with the settings of `chorale serve`; without a model, those of the
    last start hold. It changes nothing. Exit code 1: something is wrong, and the table says what to
    do. With a tenant's key it asks for one token, which the tenant pays for.
    """
    from server.cli.checks.check import Finding

    flags = flags_of({**options, "data_dir": data_dir})
    settings, finding = _find_settings(flags, options["config"], data_dir or DEFAULT_DATA_DIR)
    rows = [_row("settings", finding)]
    if settings is None:
        rows.append(_row("all others", Finding("skipped", "They need the settings.")))
    else:
        with stderr().status("Checking ...") as status:
            for check in _checks(settings, url, admin_key, api_key):
                status.update(f"Checking {check.name} ...")
                rows += [_row(check.name, finding) for finding in check.run()]
    if json:
        show_json(rows)
    else:
        show_table(tuple(rows[0]), rows, style=lambda row: _STYLES.get(row["verdict"], ""))
    if num_wrong := sum(row["verdict"] == "wrong" for row in rows):
        say(f"{num_wrong} of {len(rows)} findings are wrong.")
        raise typer.Exit(1)


def _take_options_of_serve() -> None:
    """Give `doctor` the options of `serve` that it has not itself."""
    *own, _ = inspect.signature(doctor).parameters.values()
    names = {each.name for each in own}
    shared = [it for it in inspect.signature(serve).parameters.values() if it.name not in names]
    set_options(doctor, [*shared, *(each.replace(kind=each.KEYWORD_ONLY) for each in own)])


_take_options_of_serve()


def _find_settings(
    flags: JsonObject, config: Path | None, data_dir: Path
) -> "tuple[Settings | None, Finding]":
    """The settings to check: those that are given, or else those of the last start."""
    from server.cli.checks.check import Finding
    from server.launch.settings import Settings

    try:
        return load(flags, config), Finding("ok", "They load.")
    except CommandFailed as error:
        problem = str(error)
    try:
        last = gateway_settings(data_dir)
        of_last = Settings.model_validate(last) if last else None
    except (OSError, ValueError, CommandFailed):  # of another user or release, or damaged
        return None, Finding("wrong", problem, _MEND)
    models = {name: last[name] for name in ("model", "models") if last.get(name)}
    try:
        # If a model is all that is missing, nothing is wrong: the operator just gave none.
        if models and load({**flags, **models}, config):
            given = {name: value for name, value in flags.items() if value is not None}
            found = f"No model is given: checked are the settings of the last start of {data_dir}."
            return load({**last, **given}, config), Finding("ok", found)
    except CommandFailed:
        pass
    todo = f"{_MEND} The other checks are of the last start's settings." if of_last else _MEND
    return of_last, Finding("wrong", problem, todo)


def _checks(
    settings: "Settings", url: str | None, admin_key: str | None, api_key: str | None
) -> "Iterator[Check]":
    from server.cli.checks import gateway
    from server.cli.checks.check import Check

    data_dir = settings.data_dir.expanduser().resolve()
    settings = settings.model_copy(update={"data_dir": data_dir})
    yield from _checks_of_files(settings)
    yield from _checks_of_services(settings)
    where = url or base_url(settings)
    if (release := gateway.find_release(where)) is None:
        away = partial(gateway.no_gateway, where, data_dir, is_named=url is not None)
        yield Check("gateway", away, "")
        return
    yield Check("release", partial(gateway.check_release, release), "")
    yield Check("gateway", partial(gateway.check_ready, where), _LOG)
    engines = partial(gateway.check_engines, where, admin_key, data_dir)
    todo = "Give the server's admin key: --admin-key, or the data directory that has it."
    yield Check("engines", engines, todo)
    yield Check("problems", partial(gateway.check_problems, where, admin_key, data_dir), todo)
    yield Check("audit", partial(gateway.check_audit, where), _LOG)
    request = partial(gateway.check_request, where, api_key, settings.of_models()[0].model_id)
    yield Check("request", request, "Do what the message says; the gateway's log has its line.")


def _checks_of_files(settings: "Settings") -> "Iterator[Check]":
    from server.cli.checks import configuration, gateway, machine
    from server.cli.checks.check import Check

    data_dir = settings.data_dir
    secrets = partial(configuration.check_secrets, settings)
    yield Check("secrets", secrets, "Set it, or put its file back from a backup.")
    private = partial(configuration.check_private_files, data_dir)
    yield Check("private files", private, f"Make {data_dir} readable for its owner.")
    for one in settings.of_models():
        todo = "Put the whole folder of the model there again, or mend `model`."
        yield Check(f"model {one.model_id}", partial(configuration.check_model, one), todo)
    journals = partial(gateway.check_journals, data_dir)
    yield Check("journals", journals, f"Let the server's user read {data_dir}.")
    folders = {"data_dir": data_dir, "spool_dir": settings.spool_dir, "pool_dir": settings.pool_dir}
    for name, folder in folders.items():
        if folder:
            disk = partial(machine.check_disk, folder, settings.disk_reserve_bytes)
            yield Check(f"disk of {name}", disk, f"Let the server's user write to {folder}.")
    yield Check("memory", machine.check_memory, "")
    yield Check("open files", partial(machine.check_open_files, settings), "")


def _checks_of_services(settings: "Settings") -> "Iterator[Check]":
    from server.cli.checks import configuration, gateway, services
    from server.cli.checks.check import Check

    todo = "Start the database, or mend database_url. Until it answers, requests get a 503."
    yield Check("database", partial(services.check_database, settings), todo)
    yield Check("schema", partial(services.check_schema, settings), "See the database's check.")
    todo = "Start the store, or mend `storage` and its credentials. What is cached is served."
    yield Check("store", partial(services.check_store, settings), todo)
    todo = "Start Redis, or mend redis_url. Until it answers, each gateway counts limits alone."
    yield Check("Redis", partial(services.check_redis, settings), todo)
    yield Check("clocks", partial(services.check_clocks, settings), "See the services' checks.")
    find_release = partial(gateway.find_release, base_url(settings))
    port = partial(configuration.check_port, settings, find_release)
    yield Check("port", port, "Set host to an address of this machine.")


def _row(name: str, finding: "Finding") -> JsonObject:
    return {"check": name, "verdict": finding.verdict, "found": finding.found, "do": finding.todo}
