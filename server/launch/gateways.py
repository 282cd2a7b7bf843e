"""The gateway processes of one machine: one or several, which take connections from one port.

Several inherit one listening socket. It is the supervisor's too, so a connection that waits in it
is not lost with a process. `gateway`, `gateway-2` and so on have files of their own in the data
directory, which end in "-2" and so on. They are replaced one after another: a new one starts under
a free name, and when it serves, an old one goes.
"""

import logging
import socket
import sys
from pathlib import Path

from registry.whole_files import write_whole
from server.launch.children import CLUSTER, FIRST_BEAT_S, environment, write_private
from server.launch.errors import AddressInUse
from server.launch.settings import Settings
from server.launch.supervisor import ChildSpec
from server.pool.control_files import gateway_socket, numbered
from server.text.json_object import JsonObject

logger = logging.getLogger(__name__)

_SETTLE_S = 16.0
"""Seconds a gateway gets beside the drain, for its last requests (6 s) and its last records."""
_LOOK_S = 0.1


class Gateways:
    """The gateways of a supervisor, which calls this for its children at every poll.

    settings: with an absolute data directory.   Raises AddressInUse, OSError.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._data_dir = settings.data_dir
        self._num = settings.gateways
        self._listener = listen(settings.host, settings.port).detach() if self._num > 1 else None
        # One name more than there are gateways, for the one that is to replace another.
        self._specs = [self._spec(number) for number in range(1, self._num + 1 + (self._num > 1))]
        self._serving = list(range(self._num))
        self._old: list[int] = []
        self._new: int | None = None
        _clear(self._data_dir)

    def __call__(self) -> list[ChildSpec]:
        if self._new is not None and self._has_begun(self._new):
            self._drop(self._old.pop(0), self._new)
            self._new = None
        # The name of a dropped one is not used in this call: its process has to be asked to go.
        elif self._new is None and self._old:
            (self._new,) = set(range(self._num + 1)) - set(self._serving)
        new = [] if self._new is None else [self._new]
        return [self._specs[index] for index in (*self._serving, *new)]

    def replace(self) -> None:
        """Replace all gateways that there are now, one after another."""
        if self._num == 1:
            logger.error("one gateway alone cannot be replaced while it serves: set gateways")
        elif self._old:
            logger.warning("the gateways are being replaced already")
        else:
            self._old = list(self._serving)

    def _has_begun(self, index: int) -> bool:
        """Whether the gateway listens for its neighbours, which is the last thing it begins."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_LOOK_S)
            return not probe.connect_ex(str(gateway_socket(self._data_dir, index + 1)))

    def _drop(self, old: int, new: int) -> None:
        logger.info("%s replaces %s", self._specs[new].name, self._specs[old].name)
        self._serving[self._serving.index(old)] = new
        # The next one of this name begins when it has made the socket anew.
        gateway_socket(self._data_dir, old + 1).unlink(missing_ok=True)

    def _spec(self, number: int) -> ChildSpec:
        settings, name = self._settings, numbered("gateway", number)
        path = self._data_dir / f"{name}.json"
        written: JsonObject = {"settings": settings.model_dump(mode="json")}
        if self._listener is not None:
            written |= {"number": number, "listener": self._listener}
        write_private(path, written)
        stop_timeout_s = 2 * settings.drain_timeout_s + _SETTLE_S
        return ChildSpec(
            name,
            (sys.executable, "-m", "server", str(path)),
            environment(without=CLUSTER),
            stop_timeout_s=stop_timeout_s,
            leave_timeout_s=stop_timeout_s,
            stage=2,
            first_beat_s=FIRST_BEAT_S,
            on_refusal=None if number <= self._num else _is_replacing,
            descriptors=() if self._listener is None else (self._listener,),
        )


def _is_replacing(reason: str) -> None:
    """Have a gateway that takes another's place tried again: the other goes on serving."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, and refuses connections until somebody listens. Raises AddressInUse.

    port: 0 for any that is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        message = f"Cannot listen on {host}:{port} ({reason}); choose another --port."
        raise AddressInUse(message) from None
    return listener


def _clear(data_dir: Path) -> None:
    """Leave of the gateways that ran before only what the first one goes on with."""
    for home in (data_dir, *data_dir.glob("bases/*")):
        for path in home.glob("pool/wanted-*.json"):
            path.unlink()
    for path in data_dir.glob("gateway*.sock"):
        path.unlink()
    if others := sorted(data_dir.glob("unanswered-*[0-9]")):
        first = data_dir / "unanswered"
        texts = [path.read_text() for path in (first, *others) if path.exists()]
        # What follows the last end of a line was cut off by a kill.
        write_whole(first, "".join(text[: text.rfind("\n") + 1] for text in texts).encode())
        for path in others:
            path.unlink()
