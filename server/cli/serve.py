"""`chorale serve`: engine, fetcher and gateway, until a signal."""

import logging
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server.cli.terminal import CommandFailed, say
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from server.launch.settings import Settings
    from server.launch.supervisor import Supervisor

_PROBE_TIMEOUT_S = 1.0
_PROBE_INTERVAL_S = 0.2


def serve(
    model: Annotated[
        str | None, typer.Option(help="A folder of a Llama, Mistral or Qwen model, or a hub id.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What clients call it.  [dim]default: its own name[/dim]")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Database, journal, caches, keys.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="sqlite:///file or postgresql://...")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Object store: file:///folder or s3://bucket/prefix.")
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="redis://... where several gateways count their limits together."),
    ] = None,
    engines: Annotated[int | None, typer.Option(help="How many engines; 1.")] = None,
    max_engines: Annotated[
        int | None, typer.Option(help="Start more of them when they are busy, up to so many.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="GPUs, or processes, that share one engine's model; 1.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Run the engines on this Ray cluster: HOST:PORT, or auto.")
    ] = None,
    arena_bytes: Annotated[
        int | None, typer.Option(help="Memory for KV and adapters together.")
    ] = None,
    memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory to take, without --arena-bytes.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="The base model's weights: fp8 on a GPU, int8 on a CPU.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, or fp8 on a GPU.")] = None,
    batch_invariant: Annotated[
        bool | None,
        typer.Option(
            help="On a CPU: the same bits whoever else is in the batch; for a head_dim of n x 16."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the longest request, answer included.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests in one step: 64 on a CPU, 256 on a GPU.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of an engine.")] = None,
    config: Annotated[
        Path | None, typer.Option(envvar="CHORALE_CONFIG", help="A chorale.toml.")
    ] = None,
) -> None:
    """Serve a base model and its tenants' adapters until Ctrl-C.

    Every flag is also a key of chorale.toml (--config) and a variable CHORALE_<FLAG>; there are
    more settings there than flags here. Flags win over variables, variables over the file.
    """
    flags = dict(locals())
    del flags["config"]
    started_at = time.monotonic()
    with start_serving(load(flags, config)) as (supervisor, settings):
        supervisor.run(until=Readiness(base_url(settings)))
        if not supervisor.is_stopping:
            where, took_s = base_url(settings), time.monotonic() - started_at
            say(f"Serving [bold]{settings.model_id}[/bold] at {where}, after {took_s:.1f} s.")
        supervisor.run()


def load(flags: JsonObject, config: Path | None = None) -> "Settings":
    """Settings, or a failure of the command that says which one is wrong."""
    import tomllib

    from server.launch.settings import InvalidSetting, UnknownSetting, load_settings

    try:
        return load_settings(flags, config)
    except (InvalidSetting, UnknownSetting) as error:
        raise CommandFailed(str(error), exit_code=2) from error
    except tomllib.TOMLDecodeError as error:
        raise CommandFailed(f"{config} is not TOML: {error}", exit_code=2) from error
    except OSError as error:
        raise CommandFailed(f"{config}: {error.strerror}", exit_code=2) from error


@contextmanager
def start_serving(
    settings: "Settings", *, logs: str | None = None
) -> "Iterator[tuple[Supervisor, Settings]]":
    """Run the three processes until the block ends. Settings are given back with what was derived.

    logs: the folder in the data directory that gets all they write, and what their supervisor does;
    without it all is written to this process's own output.
    """
    from server.launch.errors import ServeError
    from server.launch.plan import prepare, resolve_settings
    from server.launch.secrets import SecretError, load_admin_key
    from server.launch.supervisor import ChildCannotStart, DataDirInUse, Supervisor, lock_data_dir

    try:
        settings = resolve_settings(settings)
        with lock_data_dir(settings.data_dir):
            folder = _empty_folder(settings.data_dir / logs) if logs else None
            _begin_log(folder and folder / "supervisor.log")
            children = prepare(settings)
            admin_key = load_admin_key(settings.data_dir)
            if admin_key.path:
                say(f"The admin key is in {admin_key.path}")
            if admin_key.is_new and sys.stderr.isatty():
                say(f"It was made just now: [bold]{admin_key.key}[/bold]")
            with Supervisor(children, logs=folder) as supervisor:
                yield supervisor, settings
    except (ServeError, ChildCannotStart, DataDirInUse, SecretError) as error:
        raise CommandFailed(str(error)) from error


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _begin_log(file: Path | None) -> None:
    logging.basicConfig(level=logging.WARNING, format="supervisor: %(message)s", filename=file)
    logging.getLogger("server").setLevel(logging.INFO)


def base_url(settings: "Settings") -> str:
    """Where a client on this machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    return f"http://{host}:{settings.port}"


class Readiness:
    """Called again and again: whether the gateway answers and its engine is up."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/ready"
        self._due_at = 0.0
        # A proxy of the environment is not for this machine's own address.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __call__(self) -> bool:
        if time.monotonic() < self._due_at:
            return False
        try:
            with self._opener.open(self._url, timeout=_PROBE_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:  # nobody listens yet; an HTTP error is one of these too
            return False
        finally:
            self._due_at = time.monotonic() + _PROBE_INTERVAL_S
