"""The wire across machines: TCP sockets that only the holders of the pool's keys can use.

CURVE authenticates both sides: an engine accepts only the client key of its pool, and a gateway
accepts only the holder of the pool's server key. All traffic is encrypted, and nobody else gets an
answer. Keys are Z85 texts of 40 characters, as libzmq writes them.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator

from engine.wire.endpoint import Endpoint
from registry.whole_files import write_whole

ADDRESS_FILE = "address"
"""File in an engine's folder with the address at which it listens now."""
_ZAP_DOMAIN = "chorale"
_PING_MS = 2000
_SILENCE_MS = 10_000
"""Silence that ends a connection: libzmq pings, since a machine that is gone closes no socket."""
_Received = TypeVar("_Received")
"""Type that a socket's `recv` returns: bytes, or a future of them."""


class TcpError(Exception):
    """A connection across machines is not possible; str() tells the operator why."""


def listen(
    socket: "zmq.Socket[bytes]", address: str, server_key: str, client_key: str, address_path: Path
) -> ThreadAuthenticator:
    """Bind an engine's socket; return the thread that checks clients, to be kept as long as it.

    address: "tcp://IP:PORT" of this machine; port 0 takes a free one.   server_key: the engine's
    secret key.   client_key: public key of the gateways that may connect.
    address_path: file that tells the engine's supervisor the actual address.
    Raises TcpError, zmq.ZMQError.
    """
    check(address, server_key, client_key)
    _set_up(socket, address)
    address_path.unlink(missing_ok=True)
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    gateways = SimpleNamespace(callback=lambda domain, key: key == client_key.encode())
    authenticator.configure_curve_callback(_ZAP_DOMAIN, gateways)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    # Without this, a client with any key at all would be let in if no authenticator ran.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, server_key)
    socket.bind(address)
    actual = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    write_whole(address_path, f"{actual}\n".encode())
    return authenticator


def guard(socket: "zmq.Socket[_Received]", endpoint: Endpoint) -> None:
    """Secure a gateway's socket before it connects: only the engine of `endpoint` can read it."""
    _set_up(socket, endpoint.address)
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, endpoint.server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(endpoint.client_key.encode()))
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, endpoint.client_key)


def _set_up(socket: "zmq.Socket[_Received]", address: str) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.IPV6, int("[" in address))


def check(address: str, *keys: str) -> None:
    """Check that nothing but ciphers will be sent by TCP. Raises TcpError."""
    if not zmq.has("curve"):
        raise TcpError(
            "libzmq was built without CURVE here, so engines on other machines cannot be spoken to "
            "safely; install pyzmq's own wheel (pip install --force-reinstall pyzmq)."
        )
    if not all(keys):
        raise TcpError(f"{address} needs the pool's keys: nothing is sent by TCP without them.")
