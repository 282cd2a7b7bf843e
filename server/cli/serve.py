"""`chorale serve`: runs engine, fetcher and gateway until a signal."""

import functools
import inspect
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from lora import log_lines
from server.cli.options import set_options
from server.cli.terminal import CommandFailed, say
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.launch.settings import Settings
    from server.launch.supervised_bases import SupervisedBases
    from server.launch.supervisor import Supervisor

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 1.0
_USUAL_CONFIG = "chorale.toml"
_FLAGS = {
    "model_name": "Name of the base model for clients; by default that of its folder.",
    "data_dir": "Folder for database, journals, caches and keys, .chorale by default. It is made "
    "where it is missing.",
    "host": "Address to listen on, 127.0.0.1 by default.",
    "port": "Port to listen on, 8000 by default; 0 takes a free one.",
    "device": "Device of the model: cpu, cuda, or auto (the default), cuda if any.",
    "dtype": "Number format of weights and KV: float32, float16, bfloat16, or auto (the default), "
    "float32 on a CPU and the checkpoint's 16-bit format on a GPU.",
    "database_url": "Database: sqlite:///FILE or postgresql://..., by default an SQLite file in "
    "the data directory.",
    "storage": "Object store for adapters and scheduled exports: file:///FOLDER or "
    "s3://BUCKET/PREFIX?endpoint_url=URL, by default a folder in the data directory.",
    "redis_url": "Redis in which several gateways count their limits together: redis://... "
    "Without it a gateway counts alone.",
    "gateways": "Gateway processes on the port, 1 by default; several need PostgreSQL and Redis.",
    "engines": "How many engines run at least, 1 by default.",
    "max_engines": "How many engines run at most: more than --engines while requests wait. By "
    "default no more than --engines.",
    "tensor_parallel_size": "GPUs that share an engine's model, or processes on a CPU; 1 by "
    "default.",
    "ray": "Ray cluster to run the engines on: HOST:PORT, auto for the one that this machine is "
    "in, or local for one of its own. By default they run on this machine without Ray.",
    "arena_bytes": "Bytes of memory for KV and adapters together, in each process of an engine. "
    "By default 1 GiB on a CPU, and what --memory-utilization leaves on a GPU.",
    "memory_utilization": "Share of a GPU's memory that an engine takes, 0.9 by default. It has "
    "no effect with --arena-bytes.",
    "quantization": "What the base model's weights are rounded to: int8, int4, or fp8 on a GPU. "
    "By default they stay as the checkpoint has them.",
    "unquantized_model": "Folder of the model from which a quantised checkpoint was made. With "
    "it, passports tell how far the quantised base moves an adapter's answers.",
    "kv_cache_dtype": "Number format of KV: auto (the default), as --dtype; fp8 on a GPU.",
    "batch_invariant": "On a CPU, give a request the same tokens and logprobs, bit by bit, "
    "whatever else is in the batch. It needs the kernels in C, and a head_dim that 16 divides. "
    "Off by default.",
    "speculation": "Whether an engine drafts tokens and verifies several in a step: auto (the "
    "default), where that brings more tokens a second; or off.",
    "draft_model": "Folder of a smaller model with the same vocabulary, which drafts tokens for "
    "the base model on a CPU.",
    "max_model_len": "Most tokens of a request, prompt and answer together. By default as many as "
    "the model was made for, 8192 at most.",
    "max_num_seqs": "Most requests in one step of an engine, by default 64 on a CPU and 256 on a "
    "GPU.",
    "threads": "CPU threads of each process of an engine.",
}
"""Settings that are flags as well, each with its help; the others are described where they are."""
_KINDS: dict[str, type] = {
    "memory_utilization": float,
    "batch_invariant": bool,
    **dict.fromkeys(("data_dir", "unquantized_model", "draft_model"), Path),
    **dict.fromkeys(("port", "gateways", "engines", "max_engines", "tensor_parallel_size"), int),
    **dict.fromkeys(("arena_bytes", "max_model_len", "max_num_seqs", "threads"), int),
}
"""Types of the flags that are no text."""


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder of a model (see docs/your-model.md), or a hub id. Give it once for each "
            "base model."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(envvar="CHORALE_CONFIG", help="File with settings, such as chorale.toml."),
    ] = None,
    **given: Any,
) -> None:
    """Serve base models and the tenants' adapters for them until Ctrl-C.

    Every flag is also a key of chorale.toml (--config) and a variable CHORALE_<FLAG>; these two
    have more settings than there are flags. Flags win over variables, variables over the file.
    After SIGHUP the file is read again, and base models that came, went or changed are taken on.
    After SIGUSR2 several gateways are replaced one after another, and no answer is cut off.
    """
    flags = flags_of({"model": model, **given})
    if config is None and Path(_USUAL_CONFIG).is_file():
        say(f"{_USUAL_CONFIG} in this folder is not read: give --config {_USUAL_CONFIG}")
    started_at = time.monotonic()
    reload = functools.partial(load, flags, config)
    with start_serving(reload(), reload=reload) as (supervisor, settings):
        supervisor.run(until=lambda: is_ready(settings))
        if not supervisor.is_stopping:
            where, took_s = base_url(settings), time.monotonic() - started_at
            names = ", ".join(f"[bold]{one.model_id}[/bold]" for one in settings.of_models())
            say(f"Serving {names} at {where}, after {took_s:.1f} s.")
        supervisor.run()


def _take_flags() -> None:
    """Give `serve` a flag for each setting that has one."""
    model, config, _ = inspect.signature(serve).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    flags = [
        inspect.Parameter(
            name,
            keyword,
            default=None,
            annotation=Annotated[_KINDS.get(name, str) | None, typer.Option(help=about)],
        )
        for name, about in _FLAGS.items()
    ]
    set_options(serve, [model, *flags, config.replace(kind=keyword)])


_take_flags()


def flags_of(options: JsonObject) -> JsonObject:
    """The settings that options of the command give.   options: of `serve`, by name."""
    flags = {name: value for name, value in options.items() if name not in ("config", "model")}
    match options["model"] or ():
        case ():
            return flags
        case (path,):
            return flags | {"model": path}
        case paths:
            return flags | {"models": [{"model": path} for path in paths]}


def load(flags: JsonObject, config: Path | None = None) -> "Settings":
    """Load the settings. Raises CommandFailed, which says which setting is wrong."""
    from server.launch.settings import InvalidSetting, load_settings

    try:
        return load_settings(flags, config)
    except InvalidSetting as error:
        raise CommandFailed(str(error), exit_code=2) from error
    except ValueError as error:  # of TOML, or of UTF-8
        raise CommandFailed(f"{config} is not TOML: {error}", exit_code=2) from error


@contextmanager
def start_serving(
    settings: "Settings",
    *,
    logs: str | None = None,
    reload: "Callable[[], Settings] | None" = None,
) -> "Iterator[tuple[Supervisor, Settings]]":
    """Run the processes until the block ends. The settings come back with what was derived.

    logs: name of the folder in the data directory that gets the output of the processes and of
    their supervisor; None: it all goes to this process's own output.
    reload: loads the settings again after SIGHUP; it may raise CommandFailed.
    """
    from registry.storage.free_space import FreeSpace
    from server.launch.errors import ServeError
    from server.launch.log_files import LogFiles
    from server.launch.prepare import prepare, resolve_settings
    from server.launch.secrets import load_admin_key
    from server.launch.supervisor import Supervisor, lock_data_dir

    given = settings
    try:
        settings = resolve_settings(settings)
        with lock_data_dir(settings.data_dir):
            files = None
            if logs:
                shutil.rmtree(settings.data_dir / logs, ignore_errors=True)
                space = FreeSpace(settings.disk_reserve_bytes)
                files = LogFiles(settings.data_dir / logs, space)
            _begin_log(TextIOWrapper(files.open("supervisor")) if files else sys.stderr, settings)
            bases = prepare(settings)
            admin_key = load_admin_key(settings.data_dir)
            if admin_key.path:
                say(f"The admin key is in {admin_key.path}")
            if admin_key.is_new and sys.stderr.isatty():
                say(f"It was made just now: [bold]{admin_key.key}[/bold]")
            again = functools.partial(_take_again, bases, given, reload) if reload else None
            replace = bases.gateways.replace
            with Supervisor(bases, logs=files, reload=again, replace=replace) as supervisor:
                yield supervisor, settings
    except ServeError as error:
        raise CommandFailed(str(error)) from error


def _take_again(
    bases: "SupervisedBases", given: "Settings", reload: "Callable[[], Settings]"
) -> None:
    """Take on the base models of the settings as they are now.   given: those of the start."""
    from server.launch.settings import fixed_settings

    try:
        settings = reload()
    except CommandFailed as error:
        logger.error("The settings are left as they are: %s", error)
        return
    if changed := [n for n in fixed_settings() if getattr(settings, n) != getattr(given, n)]:
        logger.warning("Restart `chorale serve` to have these changes: %s", ", ".join(changed))
    bases.set_models(settings)


def _begin_log(stream: TextIO, settings: "Settings") -> None:
    handler = logging.StreamHandler(stream)
    log_format = log_lines.choose_format(stream, settings.log_format)
    os.environ[log_lines.VARIABLE] = log_format
    handler.setFormatter(log_lines.LineFormatter(log_format, process="supervisor"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("server").setLevel(logging.INFO)


def base_url(settings: "Settings") -> str:
    """URL at which a client on this machine reaches the gateway."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def is_ready(settings: "Settings") -> bool:
    """Whether the gateway answers and its engine is up."""
    import httpx

    try:
        # The proxy that the environment names must not be asked for this machine's own address.
        answer = httpx.get(f"{base_url(settings)}/ready", timeout=_PROBE_TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        return False
    return answer.is_success
