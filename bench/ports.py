"""Ports for processes that tests and benchmarks start."""

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""A system gives its connections ports above (Linux from 32768, macOS and Windows from 49152)."""


def free_port() -> int:
    """One that nobody has, and that no connection will have before it is bound.

    A port that a system chose itself may be the next connection's.
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
