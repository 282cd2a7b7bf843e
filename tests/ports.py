"""Ports for processes that tests start."""

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""Ports below those that systems give to connections (from 32768: Linux, 49152: macOS, Windows)."""


def free_port() -> int:
    """Return a port that is free, and that no connection will get before it is bound.

    A port that the system chose may be given to the next connection.
    """
    chance = random.SystemRandom()  # two workers may have the same seed
    for port in chance.sample(_BELOW_EPHEMERAL, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port is free in {_BELOW_EPHEMERAL}")
