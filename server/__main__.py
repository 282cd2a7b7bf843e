"""`python -m server GATEWAY.json`: serves HTTP with the configuration that the supervisor wrote."""

import gc

# What imports make stays: to look for garbage in it, now and later, takes a fifth of a start.
# ruff: noqa: E402
gc.disable()

import asyncio
import atexit
import contextlib
import json
import logging
import os
import socket
import sys
from ipaddress import ip_network
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn

from lora.beat import Beat
from lora.log_lines import choose_format, take_all
from registry.extras import ExtraMissing
from server.api.app import create_app
from server.api.connections import Connections
from server.api.http_protocol import HttpLimits, LimitedProtocol, protocol
from server.assembly import assemble
from server.console.mounting import mount
from server.database.database import DatabaseDamaged, NewerSchema, UnsupportedDatabase
from server.inference.drain import Drain
from server.launch.open_files import OTHER_FILES, allow_open_files
from server.launch.secrets import load_admin_key
from server.launch.settings import Settings
from server.logs import LogHandler, LogWriter
from server.pool.control_files import bases_file, numbered

gc.freeze()
gc.enable()

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_ACCEPTED_AT_ONCE = 64
"""Connections that are taken in one turn of the loop. There are far more places than that, so one
that sends its key at once has shown it before so many others came that it would have to give way.
"""
_MAX_UNACCEPTED = 2048
_BEAT_S = 1.0
_START_S = 3600.0
"""Longest time until the loop turns, in which the database is brought to this release."""
_LOOK_S = 0.05
_UNREAD_MS = 60_000
"""A connection whose other end takes nothing for so long is dropped, with its unsent bytes."""


def main() -> None:
    beat = Beat.inherited()
    written = json.loads(Path(sys.argv[1]).read_text())
    settings = Settings.model_validate(written["settings"])
    log_format = choose_format(sys.stderr, settings.log_format)
    number = written.get("number", 1)
    name = numbered("gateway", number)
    writer = LogWriter(sys.stderr, log_format, settings.log_level, process=name)
    atexit.register(writer.close)
    take_all(LogHandler(writer))
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        admin_key = load_admin_key(settings.data_dir)
        entries = bases_file(settings.data_dir).read()
        with beat.busy("starting", _START_S):
            gateway = assemble(settings, entries, admin_key, number)
            gateway.database.migrate()
            app = mount(create_app(gateway, writer.write))
    except (DatabaseDamaged, ExtraMissing, NewerSchema, OSError, UnsupportedDatabase) as error:
        logger.error("%s", error)
        writer.close()
        # Starting again would end the same way, unless somebody mends a file meanwhile.
        sys.exit(os.EX_DATAERR if isinstance(error, OSError) else os.EX_CONFIG)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol(HttpLimits(), _connections(settings)),
        ws="none",
        # What a header says of where a request came from gives it no right.
        proxy_headers=False,
        # uvicorn logs through the handler above; input that is not HTTP is below this level.
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=_ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=int(settings.drain_timeout_s),
    )
    gateway.metrics.gauges["log_lines_dropped"].set_function(lambda: writer.num_dropped)
    listener = written.get("listener")
    server = _Server(config, gateway.drain, beat, has_neighbours=listener is not None)
    with contextlib.suppress(KeyboardInterrupt):
        server.run([_listen(config, listener)])
    if not server.started:  # its log says why
        sys.exit(1)


class _Server(uvicorn.Server):
    """A uvicorn server that lets the gateway drain before the sockets are closed.

    beat: what the loop does as long as it turns.
    has_neighbours: whether others take connections from the same socket. Then this one stops to
    take any, and serves one more request on each of those that it has, before it drains.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Drain, beat: Beat, *, has_neighbours: bool
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._beat = beat
        self._has_neighbours = has_neighbours

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._has_neighbours:
            self._drain.begin()
        super().handle_exit(sig, frame)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        beating = asyncio.create_task(self._keep_beating())
        try:
            await super().serve(sockets)
        finally:
            beating.cancel()

    async def _keep_beating(self) -> None:
        while True:
            self._beat.beat()
            await asyncio.sleep(_BEAT_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_MAX_UNACCEPTED)  # asyncio has set what it accepts at once

    async def main_loop(self) -> None:
        """Tick once a second, instead of ten times, and as soon as the end has been asked for."""
        while not await self.on_tick(0):
            await self._drain.wait_begun(_TICK_S)
        if self._has_neighbours:
            for server in self.servers:
                server.close()
            with contextlib.suppress(TimeoutError):
                # By then a connection that waits for a request has been closed, as ever.
                await asyncio.wait_for(self._wind_down(), self.config.timeout_keep_alive + 1)
            self._drain.begin()

    async def _wind_down(self) -> None:
        """Wait until no connection will bring another request, as each client is told."""
        connections = cast(set[LimitedProtocol], self.server_state.connections)

        def may_one_come() -> bool:
            return any([connection.wind_down() for connection in connections])

        may_one_come()
        await asyncio.sleep(_LOOK_S)  # connections that were taken just before are made meanwhile
        while may_one_come():
            await asyncio.sleep(_LOOK_S)


def _connections(settings: Settings) -> Connections:
    """The limits of connections; the log says so if the system allows fewer."""
    wanted = settings.max_connections + OTHER_FILES
    if (allowed := allow_open_files(wanted)) < wanted:
        logger.warning(
            "this process may open %d files, and max_connections is %d: raise the limit of open "
            "files (ulimit -n) to %d, or lower max_connections",
            allowed, settings.max_connections, wanted,
        )  # fmt: skip
    return Connections(
        settings.max_connections,
        settings.max_connections_per_address,
        [ip_network(network) for network in settings.trusted_proxies],
    )


def _listen(config: uvicorn.Config, inherited: int | None) -> socket.socket:
    """The server's listening socket, whose options the accepted connections inherit.

    inherited: descriptor of the one that this gateway shares with its neighbours.
    TCP_USER_TIMEOUT has the kernel end a connection whose peer vanished or reads nothing (a zero
    window). The process does not watch connections that it has closed before all was sent.
    """
    listener = config.bind_socket() if inherited is None else socket.socket(fileno=inherited)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    return listener


if __name__ == "__main__":
    main()
